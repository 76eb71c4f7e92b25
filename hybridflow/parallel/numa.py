"""A rank computes on the cores beside its GPU: on a host with two sockets half of the ranks would else copy weights,
optimizer states and checkpoints through the other socket. torchrun's own --numa-binding asks for the program numactl.
"""

import os
from pathlib import Path
from typing import Any

SYSTEM = Path("/sys")


def bind_beside(gpu: Any, *, system: Path = SYSTEM) -> None:
    """Keep this process, and what it starts, on the cores of the GPU's NUMA node. Before other threads begin.

    Nothing where the system tells no node, or where a scheduler has given the process no core of that node.
    gpu: the device's properties, as torch gives them.
    """
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
        cores = _numbers((system / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):  # a virtual machine may tell neither; a node of -1 is none
        return
    allowed = os.sched_getaffinity(0)
    if cores & allowed:
        os.sched_setaffinity(0, cores & allowed)


def _numbers(text: str) -> set[int]:
    """0-3,8 as the system writes it."""
    ends = [part.split("-") for part in text.strip().split(",")]
    return {number for each in ends for number in range(int(each[0]), int(each[-1]) + 1)}
