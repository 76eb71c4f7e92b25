"""The cores beside a GPU, as a simulated system tells them."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.parallel.numa import bind_beside

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=0)


@pytest.mark.parametrize(
    ("node", "cores", "allowed", "bound"),
    [
        ("1", "4-7,12-15", range(16), [4, 5, 6, 7, 12, 13, 14, 15]),
        ("1", "4-7", (0, 5), [5]),  # of what a scheduler has given
        ("1", "4-7", (0, 1), None),
        ("-1", "4-7", range(16), None),  # a virtual machine knows no nodes
        ("", "4-7", range(16), None),
    ],
)
def test_a_process_stays_on_the_cores_of_the_node(
    node: str, cores: str, allowed: range, bound: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"bus/pci/devices/0000:9b:00.0/numa_node": node, "devices/system/node/node1/cpulist": cores}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    told: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, found: told.append(sorted(found)))
    bind_beside(GPU, system=tmp_path)
    assert told == ([] if bound is None else [bound])
