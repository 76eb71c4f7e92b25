"""The choice of experts by groups: by hand, and as transformers' router of DeepSeek-V3 makes it."""

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from hybridflow.models.experts import ExpertGroups, NarrowSigmoidRouter, SigmoidRouter
from tests.models.test_experts import config


def test_groups_of_the_best_two_by_hand() -> None:
    # sums of the best two: 0.9 + 0.1, 0.6 + 0.5, 0.8 + 0.0
    scores = torch.tensor([[0.9, 0.1, 0.05, 0.6, 0.5, 0.4, 0.8, 0.0, -0.1]])
    low = -torch.inf
    assert ExpertGroups(3, 1).masked(scores).tolist() == [[low] * 3 + scores[0, 3:6].tolist() + [low] * 3]
    assert ExpertGroups(3, 2).masked(scores).tolist() == [[*scores[0, :6].tolist(), low, low, low]]
    assert ExpertGroups(3, 3).masked(scores) is scores is ExpertGroups().masked(scores)


@pytest.mark.parametrize("router_class", [SigmoidRouter, NarrowSigmoidRouter])
@pytest.mark.parametrize(("groups", "chosen_groups"), [(4, 2), (8, 1), (2, 2)])
def test_choice_and_shares_are_transformers(router_class: type[SigmoidRouter], groups: int, chosen_groups: int) -> None:
    sizes = {"n_routed_experts": 16, "num_experts_per_tok": 2, "hidden_size": 32, "routed_scaling_factor": 1.7}
    theirs = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, n_group=groups, topk_group=chosen_groups))
    torch.manual_seed(0)
    torch.nn.init.normal_(theirs.weight)
    torch.nn.init.normal_(theirs.e_score_correction_bias)
    ours = router_class(config(num_moe_experts=16, hidden_size=32, moe_router_topk=2))
    ours.scaling, ours.groups = 1.7, ExpertGroups(groups, chosen_groups)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight)
        ours.expert_bias.copy_(theirs.e_score_correction_bias)
        tokens = torch.randn(200, 32)
        (shares, experts), (_, expected, chosen) = ours(tokens), theirs(tokens)
    for found, right, numbers, theirs_numbers in zip(shares, expected, experts, chosen, strict=True):
        by_number = dict(zip(theirs_numbers.tolist(), right.tolist(), strict=True))
        assert dict(zip(numbers.tolist(), found.tolist(), strict=True)) == pytest.approx(by_number, rel=1e-6)


def test_the_narrow_router_has_the_models_dtype_and_float32_scores() -> None:
    router = NarrowSigmoidRouter(config(num_moe_experts=8, hidden_size=32, moe_router_topk=2)).bfloat16()
    router.keep_float32()
    assert (router.weight.dtype, router.expert_bias.dtype) == (torch.bfloat16, torch.float32)
    shares, _ = router(torch.randn(3, 32).bfloat16())
    assert shares.dtype == torch.float32
