"""Reserved addresses by CUDA's driver: what tests/reshard shows on simulated ones."""

import gc

import pytest
import torch
from torch import Tensor

from hybridflow.reshard.device_memory import DeviceMemory
from hybridflow.reshard.reserved import Reserved

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def space(gpu: torch.device) -> DeviceMemory:
    return DeviceMemory(gpu)


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def mapped(num_bytes: int, space: DeviceMemory) -> tuple[Reserved, Tensor]:
    reserved = Reserved(num_bytes, space)
    reserved.map()
    return reserved, reserved.tensor()


def test_addresses_stay_and_content_arrives(space: DeviceMemory) -> None:
    reserved, flat = mapped(256 * MIB + 5, space)
    weight = flat[: 256 * MIB].view(torch.bfloat16).view(-1, 1024)
    for i in range(50):
        weight.fill_(i)
        assert weight.data_ptr() == reserved.address and bool((weight == i).all())
        reserved.unmap()
        reserved.map()
    reserved.unmap()


def test_memory_goes_back_to_the_device(space: DeviceMemory) -> None:
    torch.cuda.empty_cache()
    before = free_bytes()
    reserved, flat = mapped(512 * MIB, space)
    for _ in range(20):
        assert before - free_bytes() == pytest.approx(512 * MIB, abs=4 * MIB)
        reserved.unmap()
        assert before - free_bytes() <= 4 * MIB
        reserved.map()
    del reserved
    assert before - free_bytes() >= 508 * MIB  # a tensor is left
    del flat
    gc.collect()
    assert before - free_bytes() <= 4 * MIB


def test_a_graph_replays_with_what_was_mapped_since(space: DeviceMemory) -> None:
    reserved, flat = mapped(1024 * 1024 * 4, space)
    weight = flat.view(torch.float32).view(1024, 1024)
    x = torch.randn(8, 1024, device="cuda")
    weight.normal_()
    torch.nn.functional.linear(x, weight)  # cuBLAS takes its workspace before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.nn.functional.linear(x, weight)
    for _ in range(5):
        reserved.unmap()
        others = torch.randn(2048, 2048, device="cuda")  # what else takes memory meanwhile
        reserved.map()
        weight.normal_()
        graph.replay()
        torch.testing.assert_close(out, torch.nn.functional.linear(x, weight), rtol=1e-3, atol=1e-2)  # of about 32
        del others


def test_torchs_cache_makes_room(space: DeviceMemory) -> None:
    """Training storages are released into torch's cache, of which the driver knows nothing."""
    torch.cuda.empty_cache()
    held = torch.empty(free_bytes() - 512 * MIB, dtype=torch.uint8, device="cuda")
    reserved = Reserved(1024 * MIB, space)
    with pytest.raises(torch.OutOfMemoryError, match="bytes for the engine's weights"):
        reserved.map()
    del held  # it stays with torch
    reserved.map()
    reserved.unmap()
