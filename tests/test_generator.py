"""Whether an engine may keep addresses is one answer for all ranks."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.exchange import Exchange
from hybridflow.reshard import device_memory
from tests.reshard.simulated import SimulatedDevice

PREFIX = "gathered weights have no fixed addresses"
CASES: list[tuple[tuple[int, ...], list[tuple[bool, str | None]]]] = [  # ranks without, and what both are told
    ((), [(False, None)] * 2),
    ((1,), [(True, f"{PREFIX} on another rank"), (True, f"{PREFIX}: no driver on rank 1")]),
    ((0, 1), [(True, f"{PREFIX}: no driver on rank {rank}") for rank in (0, 1)]),
]


def ask(rank: int, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    cpu, told = torch.device("cpu"), []
    for without, _ in CASES:

        def reserved_space(device: torch.device, without: tuple[int, ...] = without) -> SimulatedDevice:
            if rank in without:
                raise EnvironmentProblem(f"no driver on rank {rank}")
            return SimulatedDevice()

        with mock.patch.object(device_memory, "reserved_space", reserved_space):
            space, why = device_memory.reserve_address_space(cpu, Exchange(dist.group.WORLD, cpu))
        told.append((space is None, why))
    torch.save(told, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.thorough
def test_one_rank_without_addresses_is_enough_for_all(tmp_path: Path) -> None:
    processes.spawn(ask, (str(tmp_path),), nprocs=2)
    told = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert [list(ranks) for ranks in zip(*told, strict=True)] == [expected for _, expected in CASES]
