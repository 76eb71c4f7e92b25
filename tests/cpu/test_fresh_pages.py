"""Memory that is taken again on a CPU: zero, and not there until somebody touches it."""

from pathlib import Path

import pytest
import torch

from hybridflow.cpu import fresh_pages


@pytest.mark.parametrize("size", [1, 4095, 4096, 12_345, 3 << 20, 40 << 20])  # some within a page, some mapped alone
def test_memory_that_is_taken_again_is_zero_to_the_last_byte(size: int) -> None:
    """Whatever the allocator gives: what lies there was written to before."""
    for _ in range(3):
        memory = torch.full((size,), 255, dtype=torch.uint8)
        before, after = torch.full((64,), 7, dtype=torch.uint8), torch.full((64,), 7, dtype=torch.uint8)
        storage = memory.untyped_storage()
        storage.resize_(0)
        storage.resize_(size)
        fresh_pages.zero(memory)
        assert memory.numpy().max() == 0 and storage.nbytes() == size
        assert before.tolist() == after.tolist() == [7] * 64, "the neighbours are as they were"


def test_pages_that_nobody_touches_are_not_there() -> None:
    """Of 256 MiB that come back, a thousandth is resident; a byte that is written stays."""
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    with_pages, storage = resident(), memory.untyped_storage()
    storage.resize_(0)
    storage.resize_(256 << 20)
    fresh_pages.zero(memory)
    assert with_pages - resident() > 250 << 20
    memory[123_456_789] = 3
    assert int(memory[123_456_789]) == 3 and int(memory[123_456_788]) == 0


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
