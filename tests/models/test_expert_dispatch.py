"""Tokens sent to their experts and back, on four ranks, against all experts on one process; DeepEP by a stand-in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.models.expert_dispatch import Arrived
from hybridflow.parallel.layout import Place
from tests.launch import run_ranks
from tests.models.dispatch_worker import CUTS, EXPERTS, HIDDEN, K, experts_at, inputs

pytestmark = [pytest.mark.distributed]

NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out: Path = tmp_path_factory.mktemp("dispatch")
    run_ranks(4, "tests.models.dispatch_worker", out)
    return [torch.load(out / f"{rank}.pt") for rank in range(4)]


def reference(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Of each rank's tokens by all experts, and the gradients of these, which all ranks' tokens give."""
    whole, ranks = experts_at(Place(1, 0), dtype), []
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in whole.parameters()]
    for rank in range(4):
        tokens, shares, chosen, weights = inputs(rank, dtype)
        outputs = whole(Arrived(tokens, shares, chosen, chosen.numel()))
        grads = torch.autograd.grad((outputs * weights).sum(), [tokens, shares, *whole.parameters()])
        ranks.append({"outputs": outputs.detach(), "tokens": grads[0], "shares": grads[1]})
        sums = [a + b for a, b in zip(sums, grads[2:], strict=True)]
    fc1, fc2 = sums
    return [of_rank | {"linear_fc1.weight": fc1, "linear_fc2.weight": fc2} for of_rank in ranks]


def part(name: str, whole: Tensor, place: Place) -> Tensor:
    rows = whole[place.ep_rank * EXPERTS // place.ep : (place.ep_rank + 1) * EXPERTS // place.ep]
    if name == "linear_fc2.weight":
        return rows.chunk(place.tp, 2)[place.tp_rank]
    return torch.cat([half.chunk(place.tp, 1)[place.tp_rank] for half in rows.chunk(2, 1)], 1)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_outputs_and_gradients_are_those_of_one_process(found: list, cut: str, dtype: torch.dtype) -> None:
    compare(found, f"alltoall, {cut}, {dtype}", cut, dtype)


def test_deep_ep_is_called_as_it_asks_for_and_gives_the_same(found: list) -> None:
    compare(found, "deepep", "whole experts", torch.bfloat16)
    for of_rank in found:
        assert of_rank["deepep"]["calls"][:4] == ["dispatch", "combine", "dispatch", "combine"]  # twice, and backward


def compare(found: list, case: str, cut: str, dtype: torch.dtype) -> None:
    for rank, expected in enumerate(reference(dtype)):
        place = CUTS[cut].places("experts")[rank]
        for name, whole in expected.items():
            value = part(name, whole, place) if name.endswith("weight") else whole
            scale = max(float(whole.float().abs().max()), 1e-9) if whole.numel() else 1.0
            mine = found[rank][case][name]
            torch.testing.assert_close(mine.float() / scale, value.float() / scale, rtol=0, atol=NEAR[dtype])


@pytest.mark.parametrize("cut", CUTS)
def test_a_token_goes_once_to_each_rank_that_holds_one_of_its_experts(found: list, cut: str) -> None:
    """Messages of a rank: counts, tokens, choices; outputs; and of the gradients as many rows the other way."""
    places = CUTS[cut].places("experts")
    for rank in range(4):
        chosen = inputs(rank, torch.float32)[2]
        held = EXPERTS // places[0].ep
        pairs = sum(len({number // held for number in numbers}) for numbers in chosen.tolist()) * places[0].tp
        copies = chosen.numel() * places[0].tp
        messages = found[rank][f"alltoall, {cut}, torch.float32"]["messages"]
        assert messages[0] == (4, 2) and messages[1:3] == [(pairs, HIDDEN), (pairs, 2 * K)]
        assert messages[4] == (pairs, HIDDEN)  # the gradient of the outputs
        assert not chosen.numel() or pairs < copies or places[0].ep == EXPERTS
        assert len(messages) == 7


def test_sizes_are_read_once(found: list) -> None:
    assert [of_rank["alltoall, whole experts, torch.float32"]["read"] for of_rank in found] == [1] * 4


def test_the_shared_expert_runs_while_tokens_travel(found: list) -> None:
    """In the backward pass while gradients travel."""
    tokens, choices = f" {HIDDEN}", f" {2 * K}"
    there = ["launch" + tokens, "launch" + choices, "shared expert", "wait" + choices, "wait" + tokens]
    back = ["launch" + tokens, "wait" + tokens]
    for of_rank in found:
        done = of_rank["order"]
        assert done[:7] == [*there, *back]
        backward = done[done.index("backward") + 1 :]
        assert backward.index("shared expert") > backward.index("launch" + tokens)
        last_wait = len(backward) - 1 - backward[::-1].index("wait" + tokens)
        assert backward.index("shared expert") < last_wait
        assert of_rank["order of DeepEP"][:2] == ["shared expert", "wait"]


def test_deep_ep_is_refused_with_its_reason_and_not_chosen_on_a_cpu(found: list) -> None:
    missing = "; ".join(f"rank {rank}: deep_ep cannot be imported" for rank in range(4))
    for of_rank in found:
        assert of_rank["auto"] == of_rank["auto on GPUs"] == "AllToAll"
        assert of_rank["refused"] == f"token_dispatcher: deepep: {missing}. Write token_dispatcher: auto"
        assert of_rank["reasons"] == [
            None,
            "each expert is cut over 2 ranks, and DeepEP sends a choice to one rank",
            "the model is in float32, and DeepEP adds in bfloat16",
            "DeepEP takes hidden sizes that are multiples of 8, this one is 12",
            "DeepEP takes up to 8 ranks or a multiple of 8, these are 12",
            None,
        ]
