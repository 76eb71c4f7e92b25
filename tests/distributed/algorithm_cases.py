"""Every algorithm and what it is compared with: for the worker the config's section, for the test the recipe."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.config import OptimizerConfig
from tests.distributed.cases import Case, make_groups, make_uneven_groups
from tests.reference import algorithms as reference
from tests.reference.algorithms import Recipe, Response
from tests.tiny_models import VOCAB_SIZE

LAYOUTS = {  # micro-batch tokens
    Case(tp=2): 64,
    Case(dp=2): 17,
    Case(tp=2, pp=2, dp=2): 64,
    Case(pp=2, cp=2): 17,  # some rows are cut, some are not
    Case(tp=2, dp=2, cp=2, sequence_parallel=True): 17,
}
SGD = OptimizerConfig(name="sgd", lr=0.1, clip_grad=0.5)
MAX_RESPONSE_LENGTH = 13
TRUNCATED = 4  # the row that is cut at the limit
CLIP = {"clip_range": 0.2, "clip_range_high": 0.3}
ENGINE = {"old_log_probs": "engine"}  # ratios are then not 1


@dataclass(frozen=True)
class Compared:
    section: dict[str, Any]
    advantages: Callable[[list[Response]], None]
    recipe: Recipe
    engine: bool = False  # whose log-probs are the old ones
    by_length: bool = False  # temperature and number of responses go by the length of a prompt


def make_rollout() -> RolloutBatch:
    """Two groups of four with gaps and tails; the engine's log-probs are near those of a random model."""
    return _with_an_engine(make_groups(), seed=11)


def _with_an_engine(rollout: RolloutBatch, seed: int) -> RolloutBatch:
    noise = torch.randn(len(rollout.input_ids), generator=torch.Generator().manual_seed(seed))
    log_probs = (0.4 * noise - torch.tensor(float(VOCAB_SIZE)).log()) * rollout.response_mask
    return replace(rollout, rollout_log_probs=log_probs, truncated=torch.arange(8) == TRUNCATED)


# the prompts of those rows have 3, 5, 2, 9, 4, 3, 1 and 4 tokens
BY_LENGTH = {
    "temperature": 0.9,
    "by_prompt_length": [
        {"up_to": 2, "temperature": 0.6, "samples_per_prompt": 3},
        {"up_to": 4, "temperature": 1.7, "samples_per_prompt": 5},
    ],
}
ROW_TEMPERATURES = (1.7, 0.9, 0.6, 0.9, 1.7, 1.7, 0.6, 1.7)


def make_uneven_rollout() -> RolloutBatch:
    """Groups of three and five, with prompts of many lengths."""
    return _with_an_engine(make_uneven_groups(), seed=5)


def make_greedy() -> RolloutBatch:
    """A response to each of the two prompts."""
    lengths, prompts = torch.tensor([7, 9]), torch.tensor([3, 4])
    tokens = torch.randint(4, VOCAB_SIZE, (16,), generator=torch.Generator().manual_seed(6))
    return RolloutBatch(
        tokens,
        lengths,
        prompts,
        torch.arange(2),
        torch.zeros(2, dtype=torch.bool),
        response_mask(lengths, prompts),
        torch.zeros(16),
    )


def greedy_scores() -> dict[int, float]:
    greedy = make_greedy()
    pieces = greedy.input_ids.split(greedy.lengths.tolist())
    return {i: reference.even_share(x[n:]) for i, (x, n) in enumerate(zip(pieces, greedy.prompt_lengths, strict=True))}


def grpo(**policy: Any) -> dict[str, Any]:
    return {"name": "grpo", "kl": {"use": "none"}, "policy": policy}


SUMS = Recipe(kind="reinforce", mean="sequence_sum_mean")
GRPO = Recipe(mean="sequence_token_mean")
ALGORITHMS: dict[str, Compared] = {
    "dr_grpo": Compared(
        {"name": "dr_grpo", "policy": CLIP},
        reference.dr_grpo,
        Recipe(mean="constant", high=0.3, max_response_length=MAX_RESPONSE_LENGTH),
    ),
    "rloo": Compared({"name": "rloo", "kl": {"coef": 0.1}}, partial(reference.rloo, kl_coef=0.1), SUMS),
    "opo": Compared({"name": "opo"}, reference.opo, SUMS),
    "maxrl": Compared({"name": "maxrl"}, reference.maxrl, SUMS),
    "remax": Compared(
        {"name": "remax", "kl": {"coef": 0.1}},
        partial(reference.remax, kl_coef=0.1, greedy=greedy_scores()),
        SUMS,
    ),
    "reinforce": Compared(
        {"name": "reinforce", "gamma": 0.9, "kl": {"coef": 0.1}, "policy": {"entropy_coef": 0.01}},
        partial(reference.reinforce, kl_coef=0.1, gamma=0.9),
        Recipe(entropy_coef=0.01),
    ),
    "reinforce_group": Compared(
        {"name": "reinforce", "baseline": "group", "kl": {"coef": 0.3}},
        reference.reinforce_group,
        Recipe(kl="k2", kl_coef=0.3),
    ),
    "distill": Compared(
        {"name": "distill", "policy": {"loss_mean": "sequence_sum_mean"}}, partial(reference.distill, gamma=0.0), SUMS
    ),
    "distill_by_length": Compared(
        {"name": "distill", "gamma": 0.9, "policy": {"kind": "clip"}},
        partial(reference.distill, gamma=0.9),
        Recipe(),
        by_length=True,
    ),
    "batch_std": Compared(
        {
            "name": "grpo",
            "std": "batch",
            "kl": {"estimator": "k3+", "coef": 0.3},
            "policy": {"loss_mean": "prompt_mean"},
        },
        reference.batch_std,
        Recipe(mean="prompt_mean", kl="k3+", kl_coef=0.3),
    ),
    "masked": Compared(grpo(mask_truncated=True), reference.grpo, replace(GRPO, masks_truncated=True)),
    "by_length": Compared(
        {
            "name": "grpo",
            "kl": {"use": "loss", "estimator": "k3", "coef": 0.3},
            "policy": {"loss_mean": "prompt_mean", "entropy_coef": 0.01},
        },
        reference.grpo,
        Recipe(mean="prompt_mean", kl="k3", kl_coef=0.3, entropy_coef=0.01),
        by_length=True,
    ),
    "by_length_rloo": Compared(
        {"name": "rloo", "kl": {"coef": 0.1}}, partial(reference.rloo, kl_coef=0.1), SUMS, by_length=True
    ),
    "by_length_weights": Compared(
        grpo(importance={"cap": 1.1}), reference.grpo, replace(GRPO, weights=("token", (1.1,))), by_length=True
    ),
    "gspo": Compared(
        grpo(kind="gspo", clip_range=0.03, clip_range_high=0.04, **ENGINE),
        reference.grpo,
        replace(GRPO, kind="gspo", low=0.03, high=0.04, old="engine"),
        engine=True,
    ),
    "cispo": Compared(
        grpo(kind="cispo", clip_range=0.3, clip_range_high=0.2, loss_mean="token_mean", **ENGINE),
        reference.grpo,
        Recipe(kind="cispo", low=0.3, high=0.2, old="engine"),
        engine=True,
    ),
    "sapo": Compared(
        grpo(kind="sapo", tau_positive=2.0, loss_mean="prompt_mean", **ENGINE),
        reference.grpo,
        Recipe(kind="sapo", mean="prompt_mean", taus=(2.0, 1.05), old="engine"),
        engine=True,
    ),
    "weights_token": Compared(grpo(importance={"cap": 1.1}), reference.grpo, replace(GRPO, weights=("token", (1.1,)))),
    "weights_sequence": Compared(
        grpo(importance={"kind": "sequence", "cap": 1.3}), reference.grpo, replace(GRPO, weights=("sequence", (1.3,)))
    ),
    "weights_geometric": Compared(
        grpo(importance={"kind": "geometric", "low": 0.95, "high": 1.2}),
        reference.grpo,
        replace(GRPO, weights=("geometric", (0.95, 1.2))),
    ),
    "weights_icepop": Compared(
        grpo(importance={"kind": "icepop", "low": 0.8, "high": 1.4}),
        reference.grpo,
        replace(GRPO, weights=("icepop", (0.8, 1.4))),
    ),
    "vapo": Compared(
        {
            "name": "ppo",
            "gamma": 0.97,
            "value_gae_lambda": 1.0,
            "length_adaptive_alpha": 0.3,
            "positive_nll_coef": 0.1,
            "kl": {"coef": 0.1},
            "value_clip_range": None,
            "policy": CLIP,
        },
        partial(reference.vapo, kl_coef=0.1, gamma=0.97, alpha=0.3, value_lambda=1.0),
        Recipe(high=0.3, positive_nll=0.1),
    ),
}


DEFAULT, REPLICATED, MIXED, CONTEXT, CONTEXT_OF_REPLICAS = LAYOUTS
WHOLE = (DEFAULT, MIXED)  # what is compared beside algorithms is in these
WEIGHTED = [name for name in ALGORITHMS if name.startswith("weights_")]
# Every algorithm is run with each way to cut a model, a batch or a row, and without it; in the mixes, those that the
# tests of `WHOLE` read, and those that couple the tokens of a row.
RUN = {case: list(ALGORITHMS) for case in LAYOUTS} | {
    MIXED: ["gspo", "cispo", "sapo", *WEIGHTED, "by_length", "vapo"],
    CONTEXT_OF_REPLICAS: ["gspo", "vapo"],
}
