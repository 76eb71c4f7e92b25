"""Rollouts of one token each, for tests that look at rows alone."""

import torch

from hybridflow.batch import RolloutBatch


def rollout(prompt_indices: list[int]) -> RolloutBatch:
    """A prompt token and a response token a row."""
    count = len(prompt_indices)
    return RolloutBatch(
        input_ids=torch.zeros(2 * count, dtype=torch.int64),
        lengths=torch.full((count,), 2),
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        prompt_indices=torch.tensor(prompt_indices),
        truncated=torch.zeros(count, dtype=torch.bool),
        response_mask=torch.tensor([False, True] * count),
        rollout_log_probs=torch.zeros(2 * count),
    )
