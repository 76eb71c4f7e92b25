"""The score of each response: the weighted sum of reward models and reward functions, and what training makes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import tokens_in_mask
from hybridflow.algorithms.rewards import (
    RunningMoments,
    batch_normalized,
    clip_scores,
    overlong_penalties,
    penalize_truncated,
)
from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config import RewardConfig
from hybridflow.config.environment import EnvironmentConfig
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.errors import RewardError
from hybridflow.parallel.exchange import PartialTensor
from hybridflow.recording.measure import Stopwatch
from hybridflow.rewards.calls import FAILURES, FunctionCaller, FunctionScores, RolloutCalls
from hybridflow.rewards.specs import function_names, function_weights, judging_weights
from hybridflow.roles.values import RewardModel


@dataclass(frozen=True)
class FunctionCalls:
    """Of all functions, (functions, N): seconds, and which have failed (`calls.FAILURES`)."""

    seconds: Tensor
    failures: Tensor

    def counted(self, kind: str) -> float:
        return float((self.failures == FAILURES[kind]).sum())


@dataclass(frozen=True)
class Scores:
    """A weighted sum that is yet to be exchanged: what this rank knows of each term, (N,) each, by name.

    functions: of each function of the sum, what the calls have taken and which rows have failed.
    failure: of a function on this rank, which ends the run where all ranks exchange what they know.
    judging: the weights of the functions where their sum says what is right.
    """

    terms: tuple[PartialTensor, ...]
    weights: tuple[float, ...]
    names: tuple[str, ...]
    functions: tuple[FunctionScores, ...] = ()
    failure: RewardError | None = None
    judging: tuple[float, ...] = ()

    def parts(self) -> tuple[PartialTensor, ...]:
        """All that is exchanged: the terms, then what the functions took, then their failures."""
        seconds = tuple(function.seconds for function in self.functions)
        return (*self.terms, *seconds, *(function.failures for function in self.functions))

    def put_together(self, wholes: Sequence[Tensor]) -> Tensor:
        """(N,) the sum, of the whole parts in their order."""
        total = torch.zeros_like(wholes[0])
        for weight, score in zip(self.weights, wholes[: len(self.terms)], strict=True):
            total += weight * score
        return total

    def of_functions(self, wholes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(N,) the sum of the functions alone, by `judging`; and above 0 where a function has failed on the row.

        Of a run without an environment, whose terms would stand behind those of the functions.
        """
        first = len(self.terms) - sum(len(function.parts) for function in self.functions)
        own = zip(self.judging, wholes[first : len(self.terms)], strict=True)
        total = torch.zeros_like(wholes[first])
        for weight, score in own:
            total += weight * score
        return total, self.calls(wholes).failures.amax(0)

    def by_name(self, wholes: Sequence[Tensor]) -> dict[str, Tensor]:
        """(N,) of each term, before the weight."""
        return dict(zip(self.names, wholes[: len(self.terms)], strict=True))

    def calls(self, wholes: Sequence[Tensor]) -> FunctionCalls:
        """What the functions took, and where they failed."""
        seconds, failures = wholes[len(self.terms) :][: len(self.functions)], wholes[len(self.terms) :]
        failures = failures[len(self.functions) :]
        return FunctionCalls(_together(seconds), _together(failures))


def call_metrics(calls: Sequence[FunctionCalls]) -> dict[str, float]:
    """Of the calls of an iteration, in milliseconds a row, and counts of rows."""
    seconds = torch.cat([each.seconds.flatten() for each in calls])
    return {
        "reward/timeouts": sum(each.counted("timeout") for each in calls),
        "reward/errors": sum(each.counted("error") for each in calls),
        "reward/row_mean_ms": 1e3 * float(seconds.mean()),
        "reward/row_max_ms": 1e3 * float(seconds.max()),
    }


def _together(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)) if tensors else torch.zeros(0, 0)


Reencode = Callable[[RolloutBatch, PromptBatch], RolloutBatch]


def _as_it_is(rollout: RolloutBatch, prompts: PromptBatch) -> RolloutBatch:
    return rollout


class Scorer:
    """Scores rollouts. limits: of responses, in tokens. reencoders: of models that have tokenizers of their own."""

    def __init__(
        self,
        config: RewardConfig,
        models: list[RewardModel],
        *,
        caller: FunctionCaller,
        watch: Stopwatch,
        limits: LengthBuckets[int],
        reencoders: Mapping[int, Reencode] | None = None,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        self._config, self.models, self._caller, self._watch = config, models, caller, watch
        self._reencoders = reencoders or {}
        self._limits = limits
        self._ahead: RolloutCalls | None = None
        self._weights = (
            *(model.weight for model in config.models),
            *(weight for weights in function_weights(config) for weight in weights),
            *(environment.weights if environment is not None else ()),
        )
        self._judging = tuple(weight for weights in judging_weights(config) for weight in weights)
        self._names = (*_part_names(config), *(environment_parts(environment) if environment is not None else ()))

    def scores(self, rollout: RolloutBatch, prompts: PromptBatch) -> Scores:
        """What this rank knows of the scores of every model and function."""
        with self._watch.phase("reward"):
            read = [self._reencoders.get(i, _as_it_is)(rollout, prompts) for i in range(len(self.models))]
            models = [model.scores(rows) for model, rows in zip(self.models, read, strict=True)]
            functions, failure = list[FunctionScores](), None
            try:
                functions = self._function_scores(rollout, prompts)
            except RewardError as error:
                failure = error
            given = environment_terms(rollout, self._caller.rank, self._caller.world_size)
        terms = (*models, *(part for function in functions for part in function.parts), *given)
        return Scores(terms, self._weights, self._names, tuple(functions), failure, judging=self._judging)

    def call_ahead(self, prompts: PromptBatch) -> RolloutCalls | None:
        """Of the rollout that is about to be made: the functions that need not wait for it."""
        if self._ahead is not None:
            self._ahead.forget()  # of a flow that has not asked for the scores
        own = [number for number in self._numbers if self._caller.spec(number).background]
        self._ahead = RolloutCalls(self._caller, own, prompts) if own else None
        return self._ahead

    def _function_scores(self, rollout: RolloutBatch, prompts: PromptBatch) -> list[FunctionScores]:
        ahead = self._ahead if self._ahead is not None and self._ahead.covers(rollout) else None
        begun = ahead.functions if ahead is not None else ()
        others = {
            number: self._caller.all_begun(number, rollout, prompts) for number in self._numbers if number not in begun
        }
        known = ahead.scores() if ahead is not None else {}
        self._ahead = None if ahead is not None else self._ahead
        known |= {number: self._caller.finish(number, units, len(rollout)) for number, units in others.items()}
        return [known[number] for number in self._numbers]

    @property
    def _numbers(self) -> range:
        """Of the functions in the pool: those of the section come first."""
        return range(len(self._config.functions) + len(self._config.remote))

    def shaped(self, scores: Tensor, rollout: RolloutBatch, moments: RunningMoments) -> tuple[Tensor, RunningMoments]:
        """(N,) scores as training sees them, and new moments: long and cut responses penalised, normalised, clipped.

        Rows that have failed are in no mean and no deviation. Their own scores mean nothing: they are not trained on.
        """
        config = self._config
        if config.truncation_penalty:
            scores = penalize_truncated(scores, rollout.truncated, penalty=config.truncation_penalty)
        if config.overlong is not None:
            limits = self._limits.for_lengths(rollout.prompt_lengths.tolist())
            scores = scores - overlong_penalties(
                _longest(rollout),
                max_response_length=torch.tensor(limits, dtype=torch.int64),
                buffer=config.overlong.buffer,
                factor=config.overlong.factor,
            )
        kept = ~rollout.failed
        if config.normalization == "batch":
            scores = scores.masked_scatter(kept, batch_normalized(scores[kept]))
        elif config.normalization == "running":
            moments = moments.updated(scores[kept])
            scores = moments.normalized(scores)
        return scores if config.clip_score is None else clip_scores(scores, config.clip_score), moments


def _longest(rollout: RolloutBatch) -> Tensor:
    """(N,) int64: response tokens of each row; of one with several sequences those of the longest."""
    lengths = tokens_in_mask(rollout.response_mask, rollout.branch_lengths)
    return torch.zeros_like(rollout.lengths).scatter_reduce(0, rollout.rows_of_branches, lengths, "amax")


def environment_parts(config: EnvironmentConfig) -> tuple[str, ...]:
    """What metrics call each part of an environment's reward."""
    return tuple(f"environment/{part}" for part in config.parts) or ("environment",)


def environment_terms(rollout: RolloutBatch, rank: int, world_size: int) -> tuple[PartialTensor, ...]:
    """A term of each part of an environment's reward, which all ranks know.

    A row that has failed has the mean of the prompt's other rows. Nothing counts that number.
    """
    own, rewards = torch.arange(len(rollout))[rank::world_size], rollout.environment_rewards
    columns = [] if rewards is None else [_filled(column, rollout.prompt_indices) for column in rewards.unbind(1)]
    return tuple(PartialTensor(len(rollout), own, column[own]) for column in columns)


def _filled(rewards: Tensor, groups: Tensor) -> Tensor:
    """(N,) with the mean of the group's numbers for each NaN; 0 where there are none."""
    there, num_groups = ~rewards.isnan(), int(groups.max()) + 1 if len(groups) else 0
    sums = torch.zeros(num_groups, dtype=torch.float64).index_add(0, groups, rewards.nan_to_num(0.0).double())
    counts = torch.zeros(num_groups, dtype=torch.float64).index_add(0, groups, there.double())
    return torch.where(there, rewards, (sums / counts.clamp(min=1.0))[groups].to(rewards.dtype))


def _part_names(config: RewardConfig) -> tuple[str, ...]:
    """`model_0`; a function's name, or that with each part; `remote_0`."""
    parts = [tuple(function.parts) for function in config.functions] + [()] * len(config.remote)
    functions = [
        f"{name}/{part}" if part else name
        for name, own in zip(function_names(config), parts, strict=True)
        for part in own or ("",)
    ]
    return (*(f"model_{i}" for i in range(len(config.models))), *functions)
