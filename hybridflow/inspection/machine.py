"""What a host gives to the ranks on the host: devices, memory, shared memory, open files, processors."""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybridflow.inspection.findings import Finding, gigabytes
from hybridflow.parallel.device import uses_cuda
from hybridflow.parallel.host_memory import GIB, LEAST_MEMORY, host_memory
from hybridflow.parallel.ranks import counted

AREA = "machine"
LEAST_SHM_CPU = 64 << 20  # vLLM leaves some 4 MiB a rank there
LEAST_SHM_CUDA = GIB  # NCCL's buffers between the GPUs of a host; a container has 64 MiB if nobody asks for more
FILES_BASE, FILES_PER_RANK = 512, 8  # a rank has a socket to each other one in every group that it shares with it


@dataclass(frozen=True)
class DeviceFacts:
    """What a rank computes on."""

    name: str
    total_bytes: int | None  # of the device's memory; None on a CPU, whose ranks share the host's
    free_bytes: int | None
    count: int  # devices that the rank sees
    capability: tuple[int, int] | None


def this_device(local_rank: int) -> DeviceFacts:
    """Of this rank."""
    if not uses_cuda():
        return DeviceFacts("CPU", None, None, 0, None)
    count = torch.cuda.device_count()
    index = min(local_rank, count - 1)
    torch.cuda.set_device(index)
    free, total = torch.cuda.mem_get_info(index)
    return DeviceFacts(torch.cuda.get_device_name(index), total, free, count, torch.cuda.get_device_capability(index))


def device_findings(devices: Mapping[int, DeviceFacts], host: str) -> list[Finding]:
    """Of the ranks of one host. Pure."""
    names = dict.fromkeys(device.name for device in devices.values())
    value = f"{counted(len(devices), 'rank')} on {', '.join(names)}"
    if all(device.total_bytes is None for device in devices.values()):
        return [Finding(AREA, "devices", host, value, figures={"ranks": len(devices)})]
    least = min(device.count for device in devices.values())
    free = {rank: device.free_bytes or 0 for rank, device in devices.items()}
    findings = [_enough_devices(least, len(devices), host, value)]
    fullest = min(free, key=lambda rank: free[rank])
    total = devices[fullest].total_bytes or 0
    value = f"rank {fullest} has least: {gigabytes(free[fullest])} free of {gigabytes(total)}"
    used = free[fullest] < 0.9 * total
    advice = "another process is on that GPU: nvidia-smi names it; end it before training" if used else ""
    figures = {f"free_bytes_rank_{rank}": count for rank, count in free.items()}
    findings.append(Finding(AREA, "GPU memory", host, value, "warn" if used else "ok", advice=advice, figures=figures))
    return findings


def _enough_devices(count: int, num_ranks: int, host: str, value: str) -> Finding:
    figures = {"ranks": num_ranks, "gpus": count}
    if count < num_ranks:
        advice = f"a rank needs a GPU of its own: start torchrun with --nproc-per-node {count} on that host"
        return Finding(AREA, "devices", host, f"{value}, {count} GPUs", "fail", advice=advice, figures=figures)
    return Finding(AREA, "devices", host, f"{value}, {count} GPUs", figures=figures)


def shared_memory() -> tuple[int, int] | None:
    """(free, total) bytes of /dev/shm; None where there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except FileNotFoundError:
        return None
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def machine_findings(host: str, *, num_ranks: int, world_size: int, cuda: bool) -> list[Finding]:
    """Memory, /dev/shm, open files and processors of this host, which has `num_ranks` of the ranks."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cpus = len(os.sched_getaffinity(0))
    return [
        memory_finding(*host_memory(), num_ranks=num_ranks, host=host),
        shm_finding(shared_memory(), num_ranks=num_ranks, host=host, cuda=cuda),
        files_finding(files, world_size=world_size, host=host),
        Finding(AREA, "processors", host, f"{cpus} for {counted(num_ranks, 'rank')}", figures={"processors": cpus}),
    ]


def memory_finding(available: int, total: int, *, num_ranks: int, host: str) -> Finding:
    value = f"{gigabytes(available)} available of {gigabytes(total)}"
    figures = {"available_bytes": available, "total_bytes": total}
    if available < num_ranks * LEAST_MEMORY:
        needed = gigabytes(num_ranks * LEAST_MEMORY)
        take = "takes" if num_ranks == 1 else "take"
        advice = f"{counted(num_ranks)} {take} {needed} before any model: end other processes"
        return Finding(AREA, "memory", host, value, "warn", advice=advice, figures=figures)
    return Finding(AREA, "memory", host, value, figures=figures)


def shm_finding(found: tuple[int, int] | None, *, num_ranks: int, host: str, cuda: bool) -> Finding:
    if found is None:
        return Finding(AREA, "/dev/shm", host, "not there", "fail", advice="mount a tmpfs at /dev/shm on that host")
    free, total = found
    value, figures = f"{gigabytes(free)} free of {gigabytes(total)}", {"free_bytes": free, "total_bytes": total}
    least = LEAST_SHM_CUDA if cuda and num_ranks > 1 else LEAST_SHM_CPU
    if free < least:
        advice = f"ranks of one host need {gigabytes(least)} there: remove old files, or give the container --shm-size"
        return Finding(AREA, "/dev/shm", host, value, "warn", advice=advice, figures=figures)
    return Finding(AREA, "/dev/shm", host, value, figures=figures)


def files_finding(limit: int, *, world_size: int, host: str) -> Finding:
    """limit: of open files, -1 for none."""
    needed = FILES_BASE + FILES_PER_RANK * world_size
    value, figures = "no limit" if limit < 0 else f"{limit:,}", {"limit": limit}
    if 0 <= limit < needed:
        advice = f"{counted(world_size)} may need {needed:,}: ulimit -n {max(65536, needed)} before torchrun is started"
        return Finding(AREA, "open files", host, value, "warn", advice=advice, figures=figures)
    return Finding(AREA, "open files", host, value, figures=figures)
