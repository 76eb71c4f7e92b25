"""Memory that goes and comes back under the tensors that view it."""

import torch

from hybridflow.models.memory import Offloaded, Released, live_bytes, storages

BITS = torch.tensor(
    [0x7FC01234, -1, 0, 1, -0x80000000, 0x7F800001], dtype=torch.int32
)  # NaNs, -0, denormals among them


def test_storages_are_counted_once() -> None:
    first, second, nothing = torch.zeros(6), torch.zeros(2, dtype=torch.float64), torch.zeros(0)
    found = storages([first[4:], second, nothing, first.view(2, 3)])
    assert [storage.data_ptr() for storage in found] == [first.data_ptr(), second.data_ptr()]
    assert live_bytes([first[4:], second, nothing, first.view(2, 3)]) == 24 + 16


def test_released_storages_are_empty_and_zero_when_they_are_back() -> None:
    flat = torch.arange(1.0, 7.0)
    row, other = flat.view(2, 3)[1], torch.ones(2)
    memory = Released([row, flat])
    assert live_bytes([flat, other]) == 8
    memory.restore()
    assert row.tolist() == [0, 0, 0] and flat.tolist() == [0] * 6 and other.tolist() == [1, 1]
    row.fill_(5)
    assert flat.tolist() == [0, 0, 0, 5, 5, 5]  # views of one storage still


def test_offloaded_storages_are_empty_and_back_bit_for_bit() -> None:
    flat = BITS.clone().view(torch.float32)
    half = torch.tensor([1, -1, 0x7FFF], dtype=torch.int16).view(torch.bfloat16)
    row = flat.view(2, 3)[1]
    memory = Offloaded([row, half, flat])
    assert live_bytes([flat, half, row]) == 0
    memory.restore()
    assert torch.equal(flat.view(torch.int32), BITS) and torch.equal(row.view(torch.int32), BITS[3:])
    assert half.view(torch.int16).tolist() == [1, -1, 0x7FFF]
    row.fill_(5)
    assert flat[3:].tolist() == [5, 5, 5]


def test_gone_and_back_again() -> None:
    x = torch.arange(4.0)
    for _ in range(3):
        memory = Offloaded([x])
        memory.restore()
        x += 1
    assert x.tolist() == [3, 4, 5, 6]


def test_parameters_keep_their_gradients_and_identity() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    (parameter**2).sum().backward()
    memory = Offloaded([parameter.data])
    memory.restore()
    (parameter**2).sum().backward()
    assert parameter.tolist() == [0, 1, 2] and parameter.grad.tolist() == [0, 4, 8]
