"""The score of each response: the weighted sum of reward models and reward functions, and what training makes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from hybridflow.by_length import ByLength
from hybridflow.config import RewardConfig
from hybridflow.parallel.exchange import Contribution
from hybridflow.recording.measure import Stopwatch
from hybridflow.rewards.background import BackgroundCalls, Group, GroupScores
from hybridflow.rewards.functions import RewardFunction, call_reward_function, load_reward_function
from hybridflow.roles.ahead import NOBODY
from hybridflow.roles.values import RewardModel


@dataclass(frozen=True)
class Scores:
    """A weighted sum that is yet to be exchanged: what this rank knows of each of its terms, (N,) each, by name."""

    contributions: tuple[Contribution, ...]
    weights: tuple[float, ...]
    names: tuple[str, ...]

    def total(self, wholes: Sequence[Tensor]) -> Tensor:
        """(N,) of the whole terms, in the order of `contributions`."""
        total = torch.zeros_like(wholes[0])
        for weight, score in zip(self.weights, wholes, strict=True):
            total += weight * score
        return total


@dataclass(frozen=True)
class FunctionCaller:
    """Calls users' functions: each row is scored once, on one rank."""

    decode: Callable[[list[int]], str]
    rank: int
    world_size: int

    def scores(self, function: RewardFunction, name: str, rollout: RolloutBatch, prompts: PromptBatch) -> Contribution:
        """Of (N,): what the function, called `name` in messages, makes of this rank's rows."""
        rows = list(range(self.rank, len(rollout), self.world_size))
        values: list[float] = []
        if rows:
            asked = rollout.prompt_indices[rows].tolist()
            values = self.called(function, name, asked, rollout.response_token_lists(rows), prompts, rows=rows)
        return self.contribution(len(rollout), rows, values)

    def called(
        self,
        function: RewardFunction,
        name: str,
        asked: list[int],
        responses: Sequence[list[int]],
        prompts: PromptBatch,
        *,
        rows: Sequence[int],
    ) -> list[float]:
        """Of responses to the prompts numbered `asked`, in one call."""
        texts = [prompts.texts[i] for i in asked]
        decoded = [self.decode(ids) for ids in responses]
        return call_reward_function(function, name, texts, decoded, _columns(prompts.columns, asked), rows=rows)

    def contribution(self, size: int, rows: list[int], values: list[float]) -> Contribution:
        where, found = torch.tensor(rows, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)
        return Contribution(size, where, found, tuple(range(self.world_size)))


class PromptCalls:
    """The functions that are called in the background, of one rollout: for each prompt's responses by themselves.

    Which prompts a rank calls them for while others are generated is the caller's to say; those that no rank has begun
    are dealt out when the rollout is whole.
    """

    def __init__(
        self, functions: Sequence[tuple[RewardFunction, str]], prompts: PromptBatch, caller: FunctionCaller
    ) -> None:
        self._functions, self._prompts, self._caller = functions, prompts, caller
        self.calls = BackgroundCalls(self._called)
        self._rollout: RolloutBatch | None = None
        self._own: list[int] = []

    def settle(self, rollout: RolloutBatch, owners: Sequence[int]) -> None:
        """The rollout is whole. owners: by prompt the rank that has begun to call, or NOBODY."""
        caller, left = self._caller, [prompt for prompt, owner in enumerate(owners) if owner == NOBODY]
        begun = [prompt for prompt, owner in enumerate(owners) if owner == caller.rank]
        self._own, self._rollout = [*begun, *left[caller.rank :: caller.world_size]], rollout

    def is_of(self, rollout: RolloutBatch) -> bool:
        """Whether this very batch is the rollout, and whole."""
        return self._rollout is rollout

    def scores(self) -> list[Contribution]:
        """Of (N,), of each function. Errors: RewardError, of a call in the background too."""
        assert self._rollout is not None, "the rollout is not whole yet"
        known = dict(self.calls.results())
        groups = [_group(self._rollout, prompt) for prompt in self._own]
        for group in groups:
            if group.prompt not in known:
                known[group.prompt] = self._called(group)
        rows = [row for group in groups for row in group.rows]
        values = [[value for group in groups for value in known[group.prompt][i]] for i in range(len(self._functions))]
        return [self._caller.contribution(len(self._rollout), rows, each) for each in values]

    def _called(self, group: Group) -> GroupScores:
        asked = [group.prompt] * len(group.rows)
        return tuple(
            self._caller.called(function, name, asked, group.responses, self._prompts, rows=group.rows)
            for function, name in self._functions
        )


def _group(rollout: RolloutBatch, prompt: int) -> Group:
    rows = (rollout.prompt_indices == prompt).nonzero().flatten().tolist()
    return Group(prompt, tuple(rows), tuple(rollout.response_token_lists(rows)))


class Scorer:
    """Scores rollouts. limits: of responses, in tokens."""

    def __init__(
        self,
        config: RewardConfig,
        models: list[RewardModel],
        *,
        caller: FunctionCaller,
        watch: Stopwatch,
        limits: ByLength[int],
    ) -> None:
        self._config, self.models, self._caller, self._watch = config, models, caller, watch
        self._limits = limits
        self._functions = [(load_reward_function(f.function), f.function) for f in config.functions]
        self._ahead: PromptCalls | None = None
        self._weights = (*(m.weight for m in config.models), *(f.weight for f in config.functions))
        self._names = _part_names(config)

    def scores(self, rollout: RolloutBatch, prompts: PromptBatch) -> Scores:
        """What this rank knows of the scores of every model and function."""
        with self._watch.phase("reward"):
            models = [model.scores(rollout) for model in self.models]
            functions = self._function_scores(rollout, prompts)
        return Scores((*models, *functions), self._weights, self._names)

    def call_ahead(self, prompts: PromptBatch) -> PromptCalls | None:
        """Of the rollout that is about to be made: what the functions are called with that need not wait for it."""
        if self._ahead is not None:
            self._ahead.calls.wait()  # of a flow that has not asked for the scores: no two calls at a time
        own = [own for own, config in zip(self._functions, self._config.functions, strict=True) if config.background]
        self._ahead = PromptCalls(own, prompts, self._caller) if own else None
        return self._ahead

    def _function_scores(self, rollout: RolloutBatch, prompts: PromptBatch) -> list[Contribution]:
        ahead = self._ahead if self._ahead is not None and self._ahead.is_of(rollout) else None
        called = iter(ahead.scores() if ahead is not None else ())
        return [
            next(called)
            if ahead is not None and config.background
            else self._caller.scores(function, name, rollout, prompts)
            for (function, name), config in zip(self._functions, self._config.functions, strict=True)
        ]

    def shaped(self, scores: Tensor, rollout: RolloutBatch, moments: RunningMoments) -> tuple[Tensor, RunningMoments]:
        """(N,) scores as training sees them, and new moments: long and cut responses penalised, normalised, clipped."""
        config = self._config
        if config.truncation_penalty:
            scores = penalize_truncated(scores, rollout.truncated, penalty=config.truncation_penalty)
        if config.overlong is not None:
            scores = scores - overlong_penalties(
                tokens_in_mask(rollout.response_mask, rollout.lengths),
                max_response_length=torch.tensor(self._limits.each(rollout.prompt_lengths.tolist()), dtype=torch.int64),
                buffer=config.overlong.buffer,
                factor=config.overlong.factor,
            )
        if config.normalization == "batch":
            scores = batch_normalized(scores)
        elif config.normalization == "running":
            moments = moments.updated(scores)
            scores = moments.normalized(scores)
        return scores if config.clip_score is None else clip_scores(scores, config.clip_score), moments


def _part_names(config: RewardConfig) -> tuple[str, ...]:
    """`model_0`, and a function's own name; with its number where several have it."""
    own = [function.function.rpartition(":")[2] for function in config.functions]
    functions = [name if own.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(own)]
    return (*(f"model_{i}" for i in range(len(config.models))), *functions)


def _columns(columns: Mapping[str, Sequence[Any]], rows: list[int]) -> dict[str, list[Any]]:
    return {name: [values[row] for row in rows] for name, values in columns.items()}
