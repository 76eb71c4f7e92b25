"""Memory of this host, or of the control group that this process is limited to."""

from pathlib import Path

GIB = 1 << 30
LEAST_MEMORY = GIB  # a rank: what Python, torch, megatron-core and vLLM take before any model


def host_memory() -> tuple[int, int]:
    """(available, total) bytes."""
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    known = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) > 1}
    available, total = known["MemAvailable"], known["MemTotal"]
    for limit, used in _group_memory():
        available, total = min(available, max(0, limit - used)), min(total, limit)
    return available, total


def _group_memory() -> list[tuple[int, int]]:
    """(limit, used) of the control group at the root that this process sees, as a container's is; none without one."""
    found = []
    for root, limit, used in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            text = (root / limit).read_text().strip()
            if text != "max":
                found.append((int(text), int((root / used).read_text())))
        except OSError:  # not mounted here, or the group of the whole machine, which has no limit
            continue
    return found
