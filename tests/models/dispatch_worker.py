"""On four ranks: experts by each way of their tokens, with outputs and gradients, and what was sent and read.

torchrun --nproc-per-node 4 -m tests.models.dispatch_worker OUT

Each rank has other tokens, rank 2 none. The last rank's experts are chosen by nobody. OUT/RANK.pt has the results.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a
from torch import Tensor

from hybridflow.errors import EnvironmentProblem
from hybridflow.models import expert_dispatch, layer_classes
from hybridflow.models.expert_dispatch import AllToAll, TokenDispatcher
from hybridflow.models.expert_rows import KernelsByTorch
from hybridflow.models.experts import Experts, MixtureOfExperts
from hybridflow.models.layers import SwiGLUFunction
from hybridflow.models.token_dispatchers import DeepEP, token_dispatcher, why_not_deep_ep
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Cut, Layout, Place
from tests.models.test_experts import config

HIDDEN, SIZE, EXPERTS, K = 16, 32, 8, 3
KERNELS = KernelsByTorch(SwiGLUFunction)
CUTS = {"whole experts": Cut(1, 1, 4), "halves": Cut(1, 2, 2), "quarters": Cut(1, 4, 1)}
SIMULATED = Path(__file__).parent / "simulated"


def inputs(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, shares, numbers of experts, and weights of the outputs in a sum."""
    generator, number = torch.Generator().manual_seed(rank), (7, 12, 0, 5)[rank]
    tokens = torch.randn(number, HIDDEN, generator=generator).to(dtype).requires_grad_()
    chosen = torch.rand(number, EXPERTS - 2, generator=generator).topk(K).indices
    shares = torch.rand(number, K, generator=generator).requires_grad_()
    return tokens, shares, chosen, torch.randn(number, HIDDEN, generator=generator).to(dtype)


def experts_at(place: Place, dtype: torch.dtype) -> Experts:
    """A rank's part of the same experts."""
    of_rank = config(num_moe_experts=EXPERTS, hidden_size=HIDDEN, moe_ffn_hidden_size=SIZE, params_dtype=dtype)
    part, generator = Experts(of_rank, KERNELS, place), torch.Generator().manual_seed(9)
    fc1 = torch.randn(EXPERTS, 2 * SIZE, HIDDEN, generator=generator) / 4
    fc2 = torch.randn(EXPERTS, HIDDEN, SIZE, generator=generator) / 4
    rows = slice(place.ep_rank * part.num_held, (place.ep_rank + 1) * part.num_held)
    halves = [half.chunk(place.tp, 1)[place.tp_rank] for half in fc1[rows].chunk(2, 1)]
    with torch.no_grad():
        part.linear_fc1.weight.copy_(torch.cat(halves, 1))
        part.linear_fc2.weight.copy_(fc2[rows].chunk(place.tp, 2)[place.tp_rank])
    return part


def computed(way: TokenDispatcher, place: Place, dtype: torch.dtype) -> dict[str, Tensor]:
    tokens, shares, chosen, weights = inputs(dist.get_rank(), dtype)
    part = experts_at(place, dtype)
    sent = way.dispatch(tokens, shares, chosen)
    outputs = sent.back(part(sent.arrived()))
    own = dict(tokens=tokens, shares=shares, **dict(part.named_parameters()))
    grads = torch.autograd.grad((outputs * weights).sum(), list(own.values()))
    return {"outputs": outputs.detach(), **dict(zip(own, grads, strict=True))}


@contextmanager
def counted(found: dict[str, Any]) -> Iterator[None]:
    """messages: rows and columns of each message of this rank. read: how often numbers went to the host."""
    found |= {"messages": [], "read": 0}
    theirs, to_host = dist.all_to_all_single, expert_dispatch.to_host_async

    def send(output: Tensor, rows: Tensor, *sizes: Any, **options: Any) -> Any:
        found["messages"].append(tuple(rows.shape))
        return theirs(output, rows, *sizes, **options)

    def read(numbers: Tensor) -> Any:
        found["read"] += 1
        return to_host(numbers)

    with mock.patch.object(dist, "all_to_all_single", send), mock.patch.object(expert_dispatch, "to_host_async", read):
        yield


def with_shared_expert(way: TokenDispatcher, place: Place, dtype: torch.dtype) -> MixtureOfExperts:
    sizes = dict(num_moe_experts=EXPERTS, moe_router_topk=K, hidden_size=HIDDEN, moe_ffn_hidden_size=SIZE)
    made_of = {"swiglu": SwiGLUFunction, "kernels": KERNELS, "place": place, "shared_size": SIZE}
    mixture = MixtureOfExperts(config(**sizes, params_dtype=dtype), **made_of)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    mixture.dispatcher, mixture.group = way, dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return mixture


def order_of_work(way: TokenDispatcher, place: Place) -> list[str]:
    """Of a mixture with a shared expert in a pass forward and one backward."""
    mixture = with_shared_expert(way, place, torch.float32)
    done: list[str] = []
    travel = expert_dispatch._Travel
    launch, wait = travel.launch, travel.wait

    def launched(self: Any, rows: Tensor, *, backward: bool) -> Tensor:
        done.append(f"launch {rows.shape[1]}")
        return launch(self, rows, backward=backward)

    def waited(self: Any) -> Tensor:
        arrived = wait(self)
        done.append(f"wait {arrived.shape[1]}")
        return arrived

    def shared(*_: object) -> None:
        done.append("shared expert")

    mixture.shared_experts.register_forward_hook(shared)
    mixture.shared_experts.linear_fc2.weight.register_hook(shared)
    with mock.patch.multiple(travel, launch=launched, wait=waited):
        hidden = torch.randn(5, 1, HIDDEN, requires_grad=True)
        output, _ = mixture(hidden)
        done.append("backward")
        output.sum().backward()
    return done


def main(out: Path) -> None:
    platforms.start(seed=0, platform="cpu")
    group, rank, found = dist.group.WORLD, dist.get_rank(), {}
    for name, cut in CUTS.items():
        place = cut.places("experts")[rank]
        for dtype in (torch.float32, torch.bfloat16):
            way = AllToAll(place, EXPERTS // place.ep, group, KERNELS)
            with counted(counts := {}):
                results = computed(way, place, dtype)
            found[f"alltoall, {name}, {dtype}"] = results | counts
    place = CUTS["whole experts"].places("experts")[rank]
    found["order"] = order_of_work(AllToAll(place, EXPERTS // 4, group, KERNELS), place)
    grid = Grid.build(Layout(1, 1, 4, (0, 1, 2, 3), ep=4), ProcessGroups())
    narrow = config(num_moe_experts=EXPERTS, hidden_size=HIDDEN, params_dtype=torch.bfloat16)
    found["auto"] = type(token_dispatcher(narrow, grid, "auto")).__name__
    try:
        token_dispatcher(narrow, grid, "deepep")
    except EnvironmentProblem as problem:
        found["refused"] = str(problem)
    sys.path.insert(0, str(SIMULATED))
    importlib.reload(fused_a2a)
    with mock.patch.object(layer_classes, "uses_cuda", lambda: True):  # and DeepEP is there
        found["auto on GPUs"] = type(token_dispatcher(narrow, grid, "auto")).__name__
    found["reasons"] = [
        why_not_deep_ep(*args)
        for args in (
            (Place(1, 0, 4), torch.bfloat16, 16),
            (Place(2, 0, 4), torch.bfloat16, 16),
            (Place(1, 0, 4), torch.float32, 16),
            (Place(1, 0, 4), torch.bfloat16, 12),
            (Place(1, 0, 12), torch.bfloat16, 16),
            (Place(1, 0, 16), torch.bfloat16, 16),
        )
    ]
    way = token_dispatcher(narrow, grid, "deepep")
    assert isinstance(way, DeepEP)
    found["deepep"] = computed(way, place, torch.bfloat16) | {"calls": fused_a2a._buffer.calls}
    found["order of DeepEP"] = order_of_deep_ep(way, place)
    torch.save(found, out / f"{rank}.pt")
    platforms.stop()


def order_of_deep_ep(way: DeepEP, place: Place) -> list[str]:
    """What a mixture with a shared expert does while tokens travel."""
    mixture = with_shared_expert(way, place, torch.bfloat16)
    done: list[str] = []
    from deep_ep.utils import EventOverlap

    wait = EventOverlap.current_stream_wait

    def waited(self: EventOverlap) -> None:
        if self.at_wait:
            done.append("wait")
        wait(self)

    mixture.shared_experts.register_forward_hook(lambda *_: done.append("shared expert"))
    with mock.patch.object(EventOverlap, "current_stream_wait", waited):
        output, _ = mixture(torch.randn(5, 1, HIDDEN, dtype=torch.bfloat16))
    assert bool(output.isfinite().all())
    return done


if __name__ == "__main__":
    main(Path(sys.argv[1]))
