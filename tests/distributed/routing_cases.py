"""Experts that an engine is said to have chosen, and the layouts that replay them: for the worker and the test."""

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, offsets
from tests.distributed.cases import NUM_LAYERS, Case, make_groups

NUM_EXPERTS, CHOSEN = 4, 2  # of `tests.tiny_models`
FAMILIES = {"mixtral": ("mixtral", False, 4), "qwen3_moe": ("qwen3_moe", True, 2)}
CASES = (
    Case(),
    Case(recompute="full"),
    Case(tp=2),
    Case(tp=2, sequence_parallel=True, recompute="full"),
    Case(dp=2, recompute="full"),
    Case(pp=2),
    Case(pp=2, recompute="full"),
    Case(pp=2, vpp=2, recompute="full"),
    Case(dp=2, ep=2, recompute="full"),  # replicas share the experts
    Case(tp=2, dp=2, ep=4, sequence_parallel=True, recompute="full"),  # and a rank routes a part of its tokens
    Case(recompute=("moe",)),
    Case(pp=2, vpp=2, recompute=("layernorm", "moe")),
    Case(tp=2, dp=2, ep=4, sequence_parallel=True, recompute=("core_attn", "moe")),
    Case(tp=2, sequence_parallel=True, recompute=("layernorm", "moe_act")),
)
BUDGETS = (24, 1000)  # micro-batch tokens: several micro-batches, and one in which prompts are shared


def make_routed_groups() -> tuple[RolloutBatch, Tensor]:
    """Two groups and any experts, (T, layers, k), also those that no router would choose. Shared prompts agree."""
    batch, generator = make_groups(), torch.Generator().manual_seed(5)
    experts = torch.rand(len(batch.input_ids), NUM_LAYERS, NUM_EXPERTS, generator=generator).topk(CHOSEN).indices
    starts, ends = offsets(batch.lengths).tolist(), batch.lengths.cumsum(0).tolist()
    for row, prompt_length in enumerate(batch.prompt_lengths.tolist()):
        first = starts[row // 4 * 4]
        shared = prompt_length - 1  # the last token of a prompt is run with each response
        experts[starts[row] : starts[row] + shared] = experts[first : first + shared]
    experts[[end - 1 for end in ends]] = 0  # no record
    experts[starts[2] + 5] = 0  # and one in the middle
    return batch, experts.to(torch.uint8)
