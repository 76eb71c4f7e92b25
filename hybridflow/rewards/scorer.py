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
from hybridflow.rewards.functions import RewardFunction, call_reward_function, load_reward_function
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
            responses = [self.decode(ids) for ids in rollout.response_token_lists(rows)]
            texts = [prompts.texts[i] for i in asked]
            values = call_reward_function(function, name, texts, responses, _columns(prompts.columns, asked), rows=rows)
        where, found = torch.tensor(rows, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)
        return Contribution(len(rollout), where, found, tuple(range(self.world_size)))


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
        self._config, self._models, self._caller, self._watch = config, models, caller, watch
        self._limits = limits
        self._functions = [(load_reward_function(f.function), f.function) for f in config.functions]
        self._weights = (*(m.weight for m in config.models), *(f.weight for f in config.functions))
        self._names = _part_names(config)

    def scores(self, rollout: RolloutBatch, prompts: PromptBatch) -> Scores:
        """What this rank knows of the scores of every model and function."""
        with self._watch.phase("reward"):
            models = [model.scores(rollout) for model in self._models]
            functions = [self._caller.scores(function, name, rollout, prompts) for function, name in self._functions]
        return Scores((*models, *functions), self._weights, self._names)

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
