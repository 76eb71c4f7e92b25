"""The score of each response: the weighted sum of reward models and reward functions, and what PPO makes of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.rewards import RunningMoments, batch_normalized, clip_scores, penalize_truncated
from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config import RewardConfig
from hybridflow.parallel.exchange import Part
from hybridflow.rewards.functions import RewardFunction, call_reward_function, load_reward_function
from hybridflow.roles.values import RewardModel


class Scorer:
    """Scores rollouts. `moments` is the state of running normalisation."""

    def __init__(
        self,
        config: RewardConfig,
        models: list[RewardModel],
        *,
        decode: Callable[[list[int]], str],
        rank: int,
        world_size: int,
    ) -> None:
        self._config = config
        self._models = models
        self._functions = [(load_reward_function(f.function), f) for f in config.functions]
        self._decode = decode
        self._rank, self._world_size = rank, world_size
        self.moments = RunningMoments()

    def parts(self, rollout: RolloutBatch, prompts: PromptBatch) -> list[Part]:
        """Of (N,) each: what this rank knows of the scores of every model and function."""
        functions = [(function, config.function) for function, config in self._functions]
        return [model.scores(rollout) for model in self._models] + [
            self.function_part(function, name, rollout, prompts) for function, name in functions
        ]

    def total(self, scores: list[Tensor]) -> Tensor:
        """(N,) weighted sum of the whole scores, in the order of `parts`."""
        weights = [model.weight for model in self._models] + [config.weight for _, config in self._functions]
        total = torch.zeros_like(scores[0])
        for weight, score in zip(weights, scores, strict=True):
            total += weight * score
        return total

    def function_part(self, function: RewardFunction, name: str, rollout: RolloutBatch, prompts: PromptBatch) -> Part:
        """Of (N,): results of a user's function, `name` in messages. Each row is scored once, on one rank."""
        rows = list(range(self._rank, len(rollout), self._world_size))
        values: list[float] = []
        if rows:
            asked = rollout.prompt_indices[rows].tolist()
            responses = [self._decode(ids) for ids in rollout.response_token_lists(rows)]
            texts = [prompts.texts[i] for i in asked]
            values = call_reward_function(function, name, texts, responses, _columns(prompts.columns, asked), rows=rows)
        where = torch.tensor(rows, dtype=torch.int64)
        return Part(len(rollout), where, torch.tensor(values, dtype=torch.float32))

    def shaped(self, scores: Tensor, rollout: RolloutBatch) -> Tensor:
        """(N,) scores as PPO sees them: the cut responses penalised, then normalised, then clipped."""
        if self._config.truncation_penalty:
            scores = penalize_truncated(scores, rollout.truncated, penalty=self._config.truncation_penalty)
        if self._config.normalization == "batch":
            scores = batch_normalized(scores)
        elif self._config.normalization == "running":
            self.moments = self.moments.updated(scores)
            scores = self.moments.normalized(scores)
        return scores if self._config.clip_score is None else clip_scores(scores, self._config.clip_score)


def _columns(columns: Mapping[str, Sequence[Any]], rows: list[int]) -> dict[str, list[Any]]:
    return {name: [values[row] for row in rows] for name, values in columns.items()}
