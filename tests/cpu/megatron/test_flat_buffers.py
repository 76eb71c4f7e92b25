"""Gathers and sums of flat buffers over three ranks, by reading and by messages, against numbers worked out by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _coalescing_manager
from torch.multiprocessing.spawn import spawn

from hybridflow.cpu import peer_memory
from hybridflow.cpu.megatron import overlays

pytestmark = pytest.mark.slow

NUM_RANKS = 3
WAYS = ("reading", "messages")
# in float32 in the ranks' order: 1e8 + 1 is 1e8, so the sum is 0; in any other it is 1
ORDERED, LARGE = (1e8, 1.0, -1e8), 5000


def measure(rank: int, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=NUM_RANKS)
    overlays.CHUNK_BYTES = 4096  # so that parts are of several
    found = {}
    for way in WAYS:
        if way == "messages" and rank == 1:
            peer_memory.can_read = lambda introduction: False
        found[way] = results(rank, dist.new_group())
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


def results(rank: int, group: dist.ProcessGroup) -> dict:
    def gather(output: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        overlays.all_gather_into_tensor(output, own, group=group, async_op=False)
        return output

    def reduce(output: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        overlays.reduce_scatter_tensor(output, whole, op=dist.ReduceOp.SUM, group=group, async_op=False)
        return output

    found = {"gathered": gather(torch.zeros(6, dtype=torch.bfloat16), torch.full((2,), rank + 0.5).bfloat16())}
    in_place = torch.arange(NUM_RANKS * LARGE, dtype=torch.float32) + 1e6 * rank
    found["gathered in place"] = gather(in_place, in_place.chunk(NUM_RANKS)[rank])
    found["in order"] = reduce(torch.zeros(1), torch.full((NUM_RANKS,), ORDERED[rank]))
    whole = torch.arange(NUM_RANKS * LARGE, dtype=torch.float32) * (rank + 1)
    found["summed in place"] = reduce(whole.chunk(NUM_RANKS)[rank], whole)
    with _coalescing_manager(group, async_ops=False):  # as megatron calls them
        found["together"] = [reduce(torch.zeros(2), torch.full((6,), float(rank + k))) for k in range(3)]
    started = torch.zeros(NUM_RANKS)
    work = overlays.all_gather_into_tensor(started, torch.tensor([rank + 1.0]), group=group, async_op=True)
    work.wait()
    found["started"] = started
    largest = torch.zeros(1)
    overlays.reduce_scatter_tensor(
        largest, torch.full((NUM_RANKS,), rank + 1.0), op=dist.ReduceOp.MAX, group=group, async_op=False
    )
    found["largest"] = largest
    found["reads"] = len(overlays._readable(group))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Of each rank."""
    out = tmp_path_factory.mktemp("flat")
    spawn(measure, (str(out),), nprocs=NUM_RANKS)
    return [torch.load(Path(out) / f"{rank}.pt") for rank in range(NUM_RANKS)]


EACH_WAY = pytest.mark.parametrize("way", WAYS)
Found = list[dict]


def each(found: Found, way: str, name: str, right: Callable[[int], torch.Tensor]) -> None:
    for rank, ways in enumerate(found):
        assert torch.equal(ways[way][name], right(rank)), f"rank {rank}"


def test_all_read_or_none_does(found: Found) -> None:
    """One that cannot is enough."""
    assert [(ways["reading"]["reads"], ways["messages"]["reads"]) for ways in found] == [(NUM_RANKS, 0)] * NUM_RANKS


@EACH_WAY
def test_every_rank_gathers_the_parts_of_all(found: Found, way: str) -> None:
    each(found, way, "gathered", lambda rank: torch.tensor([0.5, 0.5, 1.5, 1.5, 2.5, 2.5]).bfloat16())
    owners = torch.arange(NUM_RANKS).repeat_interleave(LARGE)
    each(found, way, "gathered in place", lambda rank: torch.arange(NUM_RANKS * LARGE) + 1e6 * owners)


@EACH_WAY
def test_a_sum_is_that_of_the_ranks_in_their_order(found: Found, way: str) -> None:
    each(found, way, "in order", lambda rank: torch.zeros(1))
    each(found, way, "summed in place", lambda rank: 6.0 * torch.arange(NUM_RANKS * LARGE).chunk(NUM_RANKS)[rank])


@EACH_WAY
def test_megatrons_context_for_many_puts_nothing_off(found: Found, way: str) -> None:
    for ways in found:
        assert [x.tolist() for x in ways[way]["together"]] == [[3.0, 3.0], [6.0, 6.0], [9.0, 9.0]]


@EACH_WAY
def test_what_is_only_started_or_no_sum_is_torchs(found: Found, way: str) -> None:
    each(found, way, "started", lambda rank: torch.tensor([1.0, 2.0, 3.0]))
    each(found, way, "largest", lambda rank: torch.tensor([3.0]))
