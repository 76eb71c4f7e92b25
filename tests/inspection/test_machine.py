"""What counts as too little of a host's memory, shared memory, files and GPUs: by made-up numbers."""

import pytest

from hybridflow.inspection.machine import (
    GIB,
    DeviceFacts,
    device_findings,
    files_finding,
    host_memory,
    machine_findings,
    memory_finding,
    shared_memory,
    shm_finding,
)

CPU = DeviceFacts("CPU", None, None, 0, None)


def gpu(free: int, count: int = 8) -> DeviceFacts:
    return DeviceFacts("NVIDIA H100", 80 * GIB, free * GIB, count, (9, 0))


def test_memory() -> None:
    found = memory_finding(8 * GIB, 32 * GIB, num_ranks=8, host="a")
    assert (found.status, found.value) == ("ok", "8.0 GiB available of 32.0 GiB")
    found = memory_finding(8 * GIB - 1, 32 * GIB, num_ranks=8, host="a")
    assert (found.status, found.advice) == ("warn", "8 ranks take 8.0 GiB before any model: end other processes")


@pytest.mark.parametrize(
    ("found", "ranks", "cuda", "status"),
    [
        (None, 1, False, "fail"),
        ((64 << 20, 64 << 20), 8, False, "ok"),
        ((63 << 20, 64 << 20), 8, False, "warn"),
        ((64 << 20, 64 << 20), 8, True, "warn"),  # docker's default
        ((64 << 20, 64 << 20), 1, True, "ok"),
        ((GIB, GIB), 8, True, "ok"),
    ],
)
def test_shared_memory(found: tuple[int, int] | None, ranks: int, cuda: bool, status: str) -> None:
    finding = shm_finding(found, num_ranks=ranks, host="a", cuda=cuda)
    assert finding.status == status
    assert ("--shm-size" in finding.advice) == (status == "warn")


def test_open_files() -> None:
    assert files_finding(1024, world_size=64, host="a").status == "ok"
    found = files_finding(1024, world_size=65, host="a")
    assert (found.status, found.advice[:26]) == ("warn", "65 ranks may need 1,032: u")
    assert files_finding(-1, world_size=10_000, host="a").value == "no limit"


def test_devices() -> None:
    [found] = device_findings({0: CPU, 1: CPU}, "a")
    assert (found.status, found.value) == ("ok", "2 ranks on CPU")
    devices, memory = device_findings({0: gpu(79, 2), 1: gpu(78, 2)}, "a")
    assert (devices.status, devices.value) == ("ok", "2 ranks on NVIDIA H100, 2 GPUs")
    assert (memory.status, memory.value) == ("ok", "rank 1 has least: 78.0 GiB free of 80.0 GiB")


def test_more_ranks_than_gpus_and_a_gpu_in_use() -> None:
    devices, memory = device_findings({4: gpu(20, 1), 5: gpu(79, 1)}, "a")
    assert devices.status == "fail" and "--nproc-per-node 1 on that host" in devices.advice
    assert (memory.status, memory.value) == ("warn", "rank 4 has least: 20.0 GiB free of 80.0 GiB")
    assert memory.figures == {"free_bytes_rank_4": 20 * GIB, "free_bytes_rank_5": 79 * GIB}


def test_this_machine() -> None:
    available, total = host_memory()
    assert 0 < available <= total
    free, size = shared_memory() or (0, 0)
    assert 0 < free <= size
    names = [finding.name for finding in machine_findings("a", num_ranks=1, world_size=1, cuda=False)]
    assert names == ["memory", "/dev/shm", "open files", "processors"]
