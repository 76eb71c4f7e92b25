"""Memory of this host, or of the control group that this process is limited to; and what this process has held."""

import contextlib
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

GIB = 1 << 30
LEAST_MEMORY = GIB  # a rank: what Python, torch, megatron-core and vLLM take before any model
PART_BYTES = 256 << 20  # of an optimizer's state, which a step takes to the device: a power of two, see `part_blocks`
ALIGNMENT = 64  # bytes, of a tensor among others in a block
SLOTS = 2  # parts on the device at a time


def part_blocks(state_bytes: int) -> tuple[int, int]:
    """(blocks, bytes of each) of host memory for an optimizer's state, in parts: a part fills a block.

    torch's allocator gives page-locked memory in powers of two: blocks of another size would take up to twice as much.
    """
    size = min(PART_BYTES, 1 << max(0, state_bytes - 1).bit_length())
    return -(-state_bytes // size), size


def locked_bytes(size: int) -> int:
    """Page-locked memory for so many bytes in blocks of `PART_BYTES`: the last block takes a power of two."""
    return size // PART_BYTES * PART_BYTES + power_of_two(size % PART_BYTES)


def power_of_two(size: int) -> int:
    """The least that is no less; of 0 bytes 0."""
    return 1 << (size - 1).bit_length() if size else 0


def packed_bytes(sizes: Sequence[int], *, locked: bool) -> int:
    """Host memory for tensors of these bytes, each in one piece, as `models.memory.host_tensors` makes blocks for them.

    locked: whether a block takes a power of two.
    """
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    left, room, taken = sum(aligned), 0, 0
    for size in aligned:
        if size > room:
            room = max(size, min(left, PART_BYTES))
            taken += power_of_two(room) if locked else room
        room, left = room - size, left - size
    return taken


def host_memory() -> tuple[int, int]:
    """(available, total) bytes. What files have in memory is available: the kernel gives it back."""
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
                held = int((root / used).read_text(encoding="utf-8"))
                found.append((int(text), held - _of_files(root / "memory.stat")))
        except OSError:  # not mounted here, or the group of the whole machine, which has no limit
            continue
    return found


def _of_files(statistics: Path) -> int:
    """Bytes of a control group's memory that are copies of files. total_: of version 1, with groups below."""
    try:
        rows = dict(line.split() for line in statistics.read_text(encoding="utf-8").splitlines())
    except OSError:  # a kernel without it
        return 0
    return sum(int(rows.get(f"total_{name}", rows.get(name, 0))) for name in ("active_file", "inactive_file"))
