"""A complete training batch made from a seed, for tests that only need some gradient."""

import torch

from hybridflow.flows.ppo import PPOBatchWithReference
from tests.distributed.cases import make_rollout


def make_train_batch() -> PPOBatchWithReference:
    """The sequences of `make_rollout` with random advantages and returns; old log-probs of no particular policy."""
    rollout, generator = make_rollout(), torch.Generator().manual_seed(7)
    mask = rollout.response_mask

    def noise(scale: float, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(len(mask), generator=generator) * scale + shift) * mask

    return PPOBatchWithReference(
        **vars(rollout),
        log_probs=noise(0.5, -4.0),
        ref_log_probs=noise(0.5, -4.0),
        values=noise(1.0),
        raw_scores=torch.zeros(len(rollout)),
        scores=torch.randn(len(rollout), generator=generator),
        rewards=noise(1.0),
        advantages=noise(1.0),
        returns=noise(1.0),
    )
