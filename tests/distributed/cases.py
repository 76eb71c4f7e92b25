"""What the parity worker runs and what the test compares it with: one description for both."""

from dataclasses import dataclass

import torch

from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.config import AlgorithmConfig, OptimizerConfig
from tests.reference.ppo import Hyperparameters
from tests.tiny_models import VOCAB_SIZE


@dataclass(frozen=True)
class Case:
    tp: int
    dp: int
    sequence_parallel: bool = False
    recompute: str = "none"
    all_budgets: bool = False

    @property
    def name(self) -> str:
        return f"tp{self.tp}dp{self.dp}{'sp' if self.sequence_parallel else ''}-{self.recompute}"


CASES = (
    Case(1, 1, all_budgets=True),
    Case(1, 1, recompute="full"),
    Case(2, 1),
    Case(1, 2, all_budgets=True),
    Case(2, 1, sequence_parallel=True, recompute="selective"),
    Case(2, 2, all_budgets=True),
    Case(4, 1),
    Case(2, 2, sequence_parallel=True, recompute="full"),
)
BUDGETS = (64, 17, 1000)  # micro-batch tokens: several sequences, about one, all in one
HYPER = Hyperparameters()
ALGORITHM = AlgorithmConfig(
    gamma=HYPER.gamma,
    gae_lambda=HYPER.gae_lambda,
    clip_range=HYPER.clip_low,
    clip_range_high=HYPER.clip_high,
    value_clip_range=HYPER.value_clip,
    entropy_coef=HYPER.entropy_coef,
    mini_batch_size=8,
)
SGD = OptimizerConfig(name="sgd", lr=0.1, clip_grad=0.5)
ADAM = OptimizerConfig(name="adam", lr=0.01, eps=0.1, betas=(0.8, 0.9), weight_decay=0.05, clip_grad=0.5)  # ZeRO-1
# a large eps: Adam turns rounding noise of near-zero gradients into steps


def cases_for(num_ranks: int) -> list[Case]:
    return [case for case in CASES if case.tp * case.dp == num_ranks]


def make_rollout() -> RolloutBatch:
    """Eight sequences of varying lengths, two of them of one length."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([9, 14, 6, 14, 17, 4, 11, 8])
    prompts = torch.tensor([3, 5, 2, 9, 4, 3, 1, 4])
    # from 4 on: transformers gives the padding token, 3, no gradient
    tokens = torch.randint(4, VOCAB_SIZE, (int(lengths.sum()),), generator=generator)
    mask = response_mask(lengths, prompts)
    return RolloutBatch(
        tokens, lengths, prompts, torch.arange(8), torch.zeros(8, dtype=torch.bool), mask, torch.zeros(len(tokens))
    )
