"""Memory of this host, or of the control group that this process is limited to; and what this process has held."""

import contextlib
import resource
import sys
from pathlib import Path

GIB = 1 << 30
LEAST_MEMORY = GIB  # a rank: what Python, torch, megatron-core and vLLM take before any model
PART_BYTES = 256 << 20  # of an optimizer's state, which a step takes to the device: a power of two, see `part_blocks`
SLOTS = 2  # parts on the device at a time


def part_blocks(state_bytes: int) -> tuple[int, int]:
    """(blocks, bytes of each) of host memory for an optimizer's state, in parts: a part fills a block.

    torch's allocator gives page-locked memory in powers of two: blocks of another size would take up to twice as much.
    """
    size = min(PART_BYTES, 1 << max(0, state_bytes - 1).bit_length())
    return -(-state_bytes // size), size


def host_memory() -> tuple[int, int]:
    """(available, total) bytes."""
    rows = (line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    known = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) > 1}
    available, total = known["MemAvailable"], known["MemTotal"]
    for limit, used in _group_memory():
        available, total = min(available, max(0, limit - used)), min(total, limit)
    return available, total


def peak_resident_bytes() -> int:
    """The most memory that this process has held resident, since the last reset."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10  # kB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # bytes there, kB elsewhere


def reset_peak_resident() -> None:
    """Count the peak from here on, where the kernel lets this process: proc(5), clear_refs."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _group_memory() -> list[tuple[int, int]]:
    """(limit, used) of the control group at the root that this process sees, as a container's is; none without one."""
    found = []
    for root, limit, used in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            text = (root / limit).read_text(encoding="utf-8").strip()
            if text != "max":
                found.append((int(text), int((root / used).read_text(encoding="utf-8"))))
        except OSError:  # not mounted here, or the group of the whole machine, which has no limit
            continue
    return found
