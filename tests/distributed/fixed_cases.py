"""What is trained on fixed data in the parity test: one description for the worker and the test."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.config import OptimizerConfig
from hybridflow.data.examples import Example
from tests.distributed.cases import Case
from tests.tiny_models import VOCAB_SIZE

# micro-batch tokens: about a sequence each, several, all in one
LAYOUTS = (
    (Case(tp=2), 64),
    (Case(dp=2), 20),
    (Case(pp=2, cp=2), 1000),
    (Case(tp=2, pp=2, dp=2), 20),
    (Case(tp=2, cp=2, dp=2, sequence_parallel=True), 64),
)
SGD = OptimizerConfig(name="sgd", lr=0.1, clip_grad=0.5)
MAX_LENGTH, SEED, NUM_ROWS = 18, 7, 5


@dataclass(frozen=True)
class Trained:
    section: dict[str, Any]
    model: str = "policy"  # that is trained


ALGORITHMS = {
    "sft": Trained({"name": "sft"}),
    "dpo": Trained({"name": "dpo", "beta": 0.3}),
    "dpo_smooth": Trained({"name": "dpo", "beta": 0.3, "label_smoothing": 0.2}),
    "ipo": Trained({"name": "dpo", "loss": "ipo", "beta": 0.4}),
    "dpo_step_0": Trained({"name": "dpo", "beta": 0.3}, model="reference"),
    "kto": Trained({"name": "kto", "beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.7}),
    "reward_model": Trained({"name": "reward_model"}),  # a head of its own
    "reward_model_again": Trained({"name": "reward_model"}, model="reward"),  # the head that it has
}


def layout_name(case: Case, budget: int) -> str:
    return f"{case.name}-{budget}"


def examples(kind: str) -> list[Example]:
    """Five rows with prompts of 1 to 9 tokens; the second has gaps, as of a conversation of several turns."""
    generator = torch.Generator().manual_seed(2)
    lengths = [(4, 5, 9), (3, 9, 6), (9, 3, 5), (1, 12, 2), (2, 1, 7)]  # prompt, chosen, rejected
    found = []
    for i, (prompt, *completions) in enumerate(lengths):
        own = tokens(prompt, generator)
        answers = [tokens(length, generator) for length in completions]
        if kind != "pairs":
            answers = answers[:1]
        sequences = tuple(torch.cat([own, answer]) for answer in answers)
        masks = tuple(torch.arange(len(ids)) >= prompt for ids in sequences)
        if i == 1:
            for mask in masks:
                mask[5:7] = False
        found.append(Example(sequences, masks, (prompt,) * len(sequences), label=i % 2 == 0, margin=0.25 * i))
    return found


def tokens(count: int, generator: torch.Generator) -> Tensor:
    """From 4 on: transformers gives the padding token, 3, no gradient."""
    return torch.randint(4, VOCAB_SIZE, (count,), generator=generator)
