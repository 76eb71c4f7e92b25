"""The record of collectives sees what torch does; if torch finds another way to call them, this fails."""

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel import collectives
from hybridflow.parallel.collectives import COLLECTIVES, POINT_TO_POINT, Collectives, LastCall

# each as torch.distributed is called, and the method that it ends in
CALLS = {
    "allreduce": lambda one: dist.all_reduce(one),
    "broadcast": lambda one: dist.broadcast(one, 0),
    "reduce": lambda one: dist.reduce(one, 0),
    "allgather": lambda one: dist.all_gather([torch.empty(3)], one),
    "all_gather_single": lambda one: dist.all_gather_into_tensor(torch.empty(3), one),
    "reduce_scatter_single": lambda one: dist.reduce_scatter_tensor(torch.empty(3), one),
    "gather": lambda one: dist.gather(one, [torch.empty(3)]),
    "scatter": lambda one: dist.scatter(one, [torch.empty(3)]),
    "all_to_all_single": lambda one: dist.all_to_all_single(torch.empty(3), one),
    "barrier": lambda one: dist.barrier(),
}


@pytest.fixture
def record() -> Iterator[Collectives]:
    record = Collectives.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield record
    dist.destroy_process_group()


def of_world(record: Collectives) -> LastCall:
    [found] = [call for call in record.last_calls() if call.group == "0 (default_pg, ranks 0)"]
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("operation", CALLS)
def test_a_collective_is_noted_and_counted(operation: str, record: Collectives) -> None:
    dist.barrier()
    before = of_world(record).number
    CALLS[operation](torch.ones(3))
    found = of_world(record)
    assert (found.operation, found.number, found.ranks) == (operation, before + 1, (0,))
    assert found.over and not found.inside
    assert found.tensor == ("" if operation == "barrier" else "[3] of torch.float32 (12 bytes)")


def test_every_method_is_replaced_once() -> None:
    record = Collectives.install()
    before = {name: getattr(dist.ProcessGroup, name) for name in (*COLLECTIVES, *POINT_TO_POINT)}
    assert all(method.record is record for method in before.values())
    assert Collectives.install() is record
    assert {name: getattr(dist.ProcessGroup, name) for name in before} == before


def test_no_collective_of_torch_is_missed() -> None:
    """What a process group has and we know of no reason to note."""
    others = {
        *("rank", "size", "name", "abort", "shutdown", "set_timeout", "boxed", "unbox", "split_group"),
        *("merge_remote_group", "get_group_store", "BackendType", "bound_device_id", "group_name", "group_desc"),
        *("use_pg_for_symm_mem_rendezvous", "monitored_barrier"),
        *("UNDEFINED", "GLOO", "NCCL", "UCC", "MPI", "XCCL", "CUSTOM"),
    }
    public = {name for name in vars(dist.ProcessGroup) if not name.startswith("_")}
    assert public - others <= {*COLLECTIVES, *POINT_TO_POINT}
    assert {"_allgather_base", "_reduce_scatter_base"} <= set(COLLECTIVES)


def test_a_started_collective_is_over_when_it_was_waited_for(record: Collectives) -> None:
    first, second = dist.all_reduce(torch.ones(2), async_op=True), dist.all_reduce(torch.ones(5), async_op=True)
    found = of_world(record)
    assert not found.over and not found.inside and found.tensor.startswith("[5]")
    first.wait()
    assert not of_world(record).over
    second.wait()
    assert of_world(record).over


def test_a_group_is_forgotten_when_it_ends(record: Collectives) -> None:
    before = set(record._groups)
    group = dist.new_group([0], group_desc="short-lived")
    dist.all_reduce(torch.ones(1), group=group)
    assert any("(short-lived, ranks 0)" in call.group for call in record.last_calls())
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert not any("(short-lived, ranks 0)" in call.group for call in record.last_calls())
    assert record._groups.keys() == before


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.torch, "__version__", "2.14.0+cpu")
    with pytest.raises(
        EnvironmentProblem, match=r"^torch 2\.14\.0\+cpu is installed, but hybridflow needs torch 2\.13\.0"
    ):
        Collectives.install()
