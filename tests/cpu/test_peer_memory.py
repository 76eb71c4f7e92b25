"""Reading by process_vm_readv, in this process's own memory and in another's, against torch's copies."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hybridflow.cpu import peer_memory
from hybridflow.cpu.peer_memory import PeerRectangle
from hybridflow.parallel.diagnosis import lost_peer

CHILD = """
import sys, torch
from hybridflow.cpu.peer_memory import introduction
x = torch.arange(60).view(6, 10)
print(*introduction().tolist(), x.data_ptr(), flush=True)
sys.stdin.read()
"""


def matrix(rows: int, columns: int, *, width: int) -> Tensor:
    """`columns` of `width` columns of numbers none of which is another's."""
    first = min(1, width - columns)
    return torch.arange(rows * width, dtype=torch.int16).view(rows, width)[:, first : first + columns]


def place(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), (x.stride(0) * x.element_size() if x.dim() == 2 else x.nbytes)


@pytest.mark.parametrize("rows", [1, 7, 1024, 2500])  # a call takes 1,024 runs
@pytest.mark.parametrize(("theirs", "ours"), [(5, 5), (5, 9), (9, 5), (9, 12)], ids=str)
def test_rectangles_land_and_nothing_else_does(rows: int, theirs: int, ours: int) -> None:
    source, held = matrix(rows, 5, width=theirs), torch.full((rows, ours), -1, dtype=torch.int16)
    first = min(1, ours - 5)
    target = held[:, first : first + 5]
    peer_memory.read(os.getpid(), [PeerRectangle(*place(source), target)])
    assert torch.equal(target, source)
    assert (held[:, :first] == -1).all() and (held[:, first + 5 :] == -1).all()


@pytest.mark.parametrize("limit", [1, 3, 24, 64])
def test_a_call_takes_no_more_than_its_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bytes: rows are read in turn, and what has no rows in parts."""
    monkeypatch.setattr(peer_memory, "MAX_BYTES", limit)
    sources = [matrix(9, 4, width=7), matrix(9, 4, width=4), torch.arange(11.0)]
    targets = [torch.zeros_like(x).contiguous() for x in sources]
    peer_memory.read(os.getpid(), [PeerRectangle(*place(x), y) for x, y in zip(sources, targets, strict=True)])
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


def test_nothing_is_read_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(peer_memory, "_read", lambda *arguments: calls.append(arguments))
    peer_memory.read(os.getpid(), [PeerRectangle(8, 8, torch.zeros(1, 1))])
    assert len(calls) == 1
    peer_memory.read(os.getpid(), [])
    peer_memory.read(os.getpid(), [PeerRectangle(0, 0, torch.empty(0)), PeerRectangle(0, 8, torch.empty(3, 0))])
    assert len(calls) == 1


@pytest.mark.slow
def test_another_process_is_read_and_when_it_is_gone_the_error_says_so() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    numbers = [int(number) for number in child.stdout.readline().split()]
    introduction, address = torch.tensor(numbers[:-1]), numbers[-1]
    assert peer_memory.can_read(introduction)
    target = torch.zeros(6, 4, dtype=torch.int64)
    peer_memory.read(child.pid, [PeerRectangle(address + 3 * 8, 10 * 8, target)])
    assert target.tolist() == [[10 * row + column for column in range(3, 7)] for row in range(6)]
    child.communicate("")
    assert not peer_memory.can_read(introduction)
    with pytest.raises(
        RuntimeError, match=f"memory of process {child.pid} cannot be read \\(No such process\\)"
    ) as caught:
        peer_memory.read(child.pid, [PeerRectangle(address, 80, target)])
    assert lost_peer(caught.value)


def test_what_is_no_memory_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"cannot be read \(Bad address\)"):
        peer_memory.read(os.getpid(), [PeerRectangle(8, 8, torch.zeros(2, 1, dtype=torch.int64))])


@pytest.mark.parametrize("field", [0, 1, 2, 3])
def test_who_is_elsewhere_or_another_than_it_says_is_not_read(field: int) -> None:
    """Another host, another process, an address that is none, another number there."""
    introduction = peer_memory.introduction()
    assert peer_memory.can_read(introduction)
    introduction[field] = {1: os.getppid(), 2: 8}.get(field, int(introduction[field]) - 1)
    assert not peer_memory.can_read(introduction)


def test_a_host_without_a_name_reads_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_host", lambda: 0)
    assert not peer_memory.can_read(peer_memory.introduction())
