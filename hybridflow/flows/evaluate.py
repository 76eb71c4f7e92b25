"""Held-out evaluation: how many responses are right, and their mean score. Never trained on.

evaluated = evaluate(heldout, responses, judge, ...)        # collective over the world
evaluated.metrics()                                         # {"eval/math/accuracy": 0.25, ...}
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.evaluation import majority_at_k, pass_at_k
from hybridflow.batch import PromptBatch, RolloutBatch, offsets
from hybridflow.errors import RewardError
from hybridflow.parallel.agreement import raise_on_all_ranks
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.rewards.answers import AnswerReader
from hybridflow.rewards.calls import FunctionCaller
from hybridflow.rewards.scorer import Scorer, Scores

ROUNDING = 1e-6  # float32 sums of weights such as 0.7 + 0.2 + 0.1 may lie so far below 1


@dataclass(frozen=True)
class HeldoutSet:
    """Prompts to evaluate on. name: "" of the only set. temperature: 0 takes the likeliest token always."""

    name: str
    prompts: PromptBatch
    samples: int = 1
    temperature: float = 0.0

    @property
    def title(self) -> str:
        """For people and files."""
        return self.name or "heldout"


@dataclass(frozen=True)
class Judge:
    """Who says what is right: a score of `threshold` or more is.

    function: of the pool of reward functions, by number; None: the rewards of the environment, by these weights, or
    with no weights the reward functions of the run by theirs. read: the answer in a response, for the majority.
    """

    function: int | None
    weights: tuple[float, ...]
    threshold: float
    read: AnswerReader


@dataclass(frozen=True)
class EvaluatedSet:
    """A set with its responses, prompt after prompt.

    marks: (N,) of the judge, 0 of failed rows. right: (N,) bool. scores: (N,) of the section reward, where there is
    one. num_failed: None where a failed row would have ended the run. answers: by prompt, of several samples.
    """

    heldout: HeldoutSet
    responses: RolloutBatch
    marks: Tensor
    right: Tensor
    scores: Tensor | None
    num_failed: int | None
    answers: Sequence[Sequence[Hashable | None]]

    @property
    def accuracy(self) -> float:
        """The share of right responses: avg@k, since all prompts have k."""
        return float(self.right.float().mean())

    @property
    def score_mean(self) -> float | None:
        """Over the rows that have not failed; None where there is none."""
        there = ~self.responses.failed
        return None if self.scores is None or not there.any() else float(self.scores[there].mean())

    @property
    def response_length_mean(self) -> float:
        """Tokens that the policy chose."""
        return self.responses.num_response_tokens / len(self.responses)

    @property
    def truncated_fraction(self) -> float:
        return float(self.responses.truncated.float().mean())

    def pass_at(self, k: int) -> float:
        return float(pass_at_k(self._by_prompt, k).mean())

    @property
    def majority(self) -> float:
        return float(majority_at_k(self._by_prompt, self.answers).float().mean())

    def metrics(self) -> dict[str, float]:
        """Metrics by name, for metrics.csv. The unnamed set gives accuracy, score mean and failed rows alone."""
        name, samples = self.heldout.name, self.heldout.samples
        found: dict[str, float | None] = {
            "eval/accuracy": self.accuracy,
            "eval/score_mean": self.score_mean,
            "eval/failed_rows": None if self.num_failed is None else float(self.num_failed),
        }
        if name:
            found = {metric.replace("eval", f"eval/{name}", 1): value for metric, value in found.items()}
            found[f"eval/{name}/response_length_mean"] = self.response_length_mean
            found[f"eval/{name}/truncated_fraction"] = self.truncated_fraction
        if name and samples > 1:
            found[f"eval/{name}/pass_at_{samples}"] = self.pass_at(samples)
            found[f"eval/{name}/majority_at_{samples}"] = self.majority
        return {metric: value for metric, value in found.items() if value is not None}

    @property
    def _by_prompt(self) -> Tensor:
        return self.right.view(len(self.heldout.prompts), self.heldout.samples)


def evaluate(
    heldout: HeldoutSet,
    responses: RolloutBatch,
    judge: Judge,
    *,
    caller: FunctionCaller,
    scorer: Scorer | None,
    exchange: Exchange,
) -> EvaluatedSet:
    """Judge and score all responses to a set. Collective over the world.

    A row that has failed, or that the judge fails on where that does not end the run, is not right, and is counted.
    """
    prompts, own, failure = heldout.prompts, list[PartialTensor](), None
    if judge.function is not None:
        try:
            marks = caller.scores(judge.function, responses, prompts)
            own = [*marks.parts, marks.failures]
        except RewardError as error:
            failure = error
    scores = scorer.scores(responses, prompts) if scorer is not None else None
    if judge.function is not None or scores is not None:
        raise_on_all_ranks(failure or (scores.failure if scores is not None else None), exchange.group)
    asked = [*own, *(scores.parts() if scores is not None else ())]
    wholes = exchange.gather_all(asked) if asked else []
    if judge.function is not None:
        values, failures, *wholes = wholes
    elif judge.weights:
        assert responses.environment_rewards is not None, "an environment has judged"
        rewards = responses.environment_rewards @ torch.tensor(judge.weights)
        values, failures = rewards.nan_to_num(0.0), rewards.isnan().float()
    else:
        assert scores is not None, "the functions that judge are those of a section reward"
        values, failures = scores.of_functions(wholes)
    there = failures == 0
    return EvaluatedSet(
        heldout,
        responses,
        marks=values * there,
        right=(values >= judge.threshold - ROUNDING) & there,
        scores=None if scores is None else scores.put_together(wholes),
        num_failed=int((~there).sum()) if _goes_on(judge, caller, scores) else None,
        answers=_answers(responses, heldout.samples, judge.read, caller) if heldout.samples > 1 else (),
    )


def _goes_on(judge: Judge, caller: FunctionCaller, scores: Scores | None) -> bool:
    """Whether there may be rows that the judge has failed on."""
    if judge.weights:
        return True
    judging = [judge.function] if judge.function is not None else range(len(scores.functions) if scores else 0)
    return any(caller.failure_score(function, "timeout") is not None for function in judging)


def _answers(
    responses: RolloutBatch, samples: int, read: AnswerReader, caller: FunctionCaller
) -> list[list[Hashable | None]]:
    found = [read(caller.decode(ids)) for ids in last_turns(responses)]
    return [found[first : first + samples] for first in range(0, len(found), samples)]


def last_turns(batch: RolloutBatch) -> list[list[int]]:
    """Of each row what the policy wrote last without a break: the response, or the last turn of a conversation."""
    found = []
    starts = (offsets(batch.lengths) + batch.prompt_lengths).tolist()
    for start, end in zip(starts, batch.lengths.cumsum(0).tolist(), strict=True):
        ids, chosen = batch.input_ids[start:end].tolist(), batch.response_mask[start:end].tolist()
        stop = len(chosen) - chosen[::-1].index(True) if any(chosen) else 0
        first = stop
        while first and chosen[first - 1]:
            first -= 1
        found.append(ids[first:stop])
    return found
