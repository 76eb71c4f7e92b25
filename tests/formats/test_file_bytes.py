"""The memory of tensors: all its bytes, alive as long as the view, and a storage that may still be emptied."""

import pytest
import torch

from hybridflow.formats.file_bytes import memory_of


def test_the_view_is_the_memory() -> None:
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    view = memory_of(tensor)
    assert bytes(view) == bytes([0x80, 0x3F, 0x00, 0xC0])  # little-endian, the upper half of float32's bytes
    view[2:4] = bytes([0x40, 0x40])
    assert tensor.tolist() == [1.0, 3.0]
    assert bytes(memory_of(torch.zeros(0))) == b""


def test_the_memory_lives_as_long_as_the_view() -> None:
    view = memory_of(torch.full((1 << 20,), 7, dtype=torch.uint8))
    others = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(4)]
    assert bytes(view) == b"\x07" * (1 << 20)
    assert all(not other.any() for other in others)


def test_a_storage_whose_memory_was_read_can_be_emptied_and_filled() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    memory_of(weight[2:6])
    storage = weight.untyped_storage()
    storage.resize_(0)
    storage.resize_(32)
    assert storage.resizable()


def test_what_is_not_contiguous_has_no_memory_of_its_own() -> None:
    with pytest.raises(AssertionError, match=r"\(3, 2\)"):
        memory_of(torch.ones(2, 3).T)
