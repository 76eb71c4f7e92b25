"""How often the advantages of a batch are estimated."""

from unittest import mock

import pytest
import torch

from hybridflow.algorithms.advantages import gae
from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.config.algorithms import PPO
from hybridflow.flows import ppo

LENGTHS, PROMPTS = torch.tensor([5, 3]), torch.tensor([2, 1])
MASK = response_mask(LENGTHS, PROMPTS)
ROLLOUT = RolloutBatch(torch.arange(8), LENGTHS, PROMPTS, torch.arange(2), LENGTHS < 0, MASK, torch.zeros(8))
REWARDS, VALUES = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)) * MASK


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, 1),
        ({"value_gae_lambda": 0.95}, 1),
        ({"value_gae_lambda": 1.0}, 2),
        ({"length_adaptive_alpha": 0.05}, 2),
    ],
)
def test_advantages_are_estimated_once_where_the_lambdas_are_equal(options: dict, calls: int) -> None:
    c = PPO(gae_lambda=0.95, **options)
    with mock.patch.object(ppo, "gae", wraps=gae) as counted:
        advantages, returns = ppo.estimates(c, ROLLOUT, REWARDS, VALUES)
    assert counted.call_count == calls
    of_policy, of_critic = ppo.lambdas(c, ROLLOUT)
    same = {"lengths": LENGTHS, "gamma": c.gamma}
    assert torch.equal(advantages, gae(REWARDS, VALUES, MASK, gae_lambda=of_policy, **same)[0])
    assert torch.equal(returns, gae(REWARDS, VALUES, MASK, gae_lambda=of_critic, **same)[1])
