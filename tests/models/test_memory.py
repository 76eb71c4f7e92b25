"""Memory that goes and comes back under the tensors that view it."""

import pytest
import torch

from hybridflow.models import memory as memory_module
from hybridflow.models.memory import HostMemory, Offloaded, Released, host_tensors, live_bytes, storages

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
    memory = Offloaded([row, half, flat], HostMemory(kept=False))
    assert live_bytes([flat, half, row]) == 0
    memory.restore()
    assert torch.equal(flat.view(torch.int32), BITS) and torch.equal(row.view(torch.int32), BITS[3:])
    assert half.view(torch.int16).tolist() == [1, -1, 0x7FFF]
    row.fill_(5)
    assert flat[3:].tolist() == [5, 5, 5]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("block_bytes", [1, 5, 16, 1 << 20])  # storages over many blocks, over some, all in one
def test_gone_and_back_many_times(block_bytes: int, kept: bool) -> None:
    """With views, with storages of no even size, and more of them from the third round on, as moments come."""
    host = HostMemory(kept=kept, block_bytes=block_bytes)
    x, bits, late = torch.arange(4.0), BITS.clone(), torch.tensor([7, 9], dtype=torch.int8)
    view = x.view(2, 2)[1]
    for round_number in range(20):
        tensors = [x, view, bits] if round_number < 2 else [bits, late, x]
        memory = Offloaded(tensors, host)
        assert live_bytes(tensors) == 0
        memory.restore()
        assert bool(host.blocks) == kept
        x += 1
        assert x.tolist() == [i + round_number + 1 for i in range(4)]
        assert torch.equal(view, x[2:]) and torch.equal(bits, BITS) and late.tolist() == [7, 9]


def test_host_memory_is_made_once_and_again_only_for_more() -> None:
    host, x, y = HostMemory(kept=True, block_bytes=8), torch.arange(3.0), torch.arange(2.0)
    made = []
    for tensors in ([x], [x], [x, y], [y], [y, x]):
        Offloaded(tensors, host).restore()
        made.append([block.data_ptr() for block in host.blocks])
    assert [len(blocks) for blocks in made] == [2, 2, 3, 3, 3]
    assert made[0] == made[1] and made[2] == made[3] == made[4]
    assert [block.nbytes for block in host.blocks] == [8, 8, 4]


def test_tensors_in_host_memory_share_blocks_and_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins at 64 bytes; one that is larger than a block has one of its own; the last block has what is left."""
    made, block = [], memory_module.host_block
    monkeypatch.setattr(memory_module, "host_block", lambda size: made.append(size) or block(size))
    monkeypatch.setattr(memory_module, "BLOCK_BYTES", 256)
    wanted = [
        ((3, 5), torch.float32),
        ((), torch.int64),
        ((100,), torch.bfloat16),
        ((300,), torch.int8),
        ((0,), torch.int8),
    ]
    wanted.append(((2,), torch.float32))
    tensors = [*host_tensors(wanted)]
    assert made == [256, 256, 320, 64] and [(tuple(x.shape), x.dtype) for x in tensors] == wanted
    for number, x in enumerate(tensors):
        x.fill_(number)
    assert [x.unique().tolist() for x in tensors] == [[0], [1], [2], [3], [], [5]]


def test_parameters_keep_their_gradients_and_identity() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    (parameter**2).sum().backward()
    memory = Offloaded([parameter.data], HostMemory(kept=False))
    memory.restore()
    (parameter**2).sum().backward()
    assert parameter.tolist() == [0, 1, 2] and parameter.grad.tolist() == [0, 4, 8]
