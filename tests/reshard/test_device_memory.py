"""What a GPU's memory asks of CUDA's driver, of which one is simulated here; tests/gpu has the real one.

ctypes converts the arguments as it would for the driver: the simulated functions have the signatures of `SIGNATURES`.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.errors import EnvironmentProblem
from hybridflow.reshard import device_memory
from hybridflow.reshard.device_memory import (
    OUT_OF_MEMORY,
    SIGNATURES,
    Access,
    DeviceMemory,
    DriverError,
    Location,
    Properties,
    reserved_space,
)
from hybridflow.reshard.reserved import Reserved

PAGE, ROOM, NUMBER = 4096, 4 * 4096, 3
INVALID_VALUE = 1  # cuda.h


class SimulatedDriver:
    """Room for four pages. Memory is there while a handle or a mapping holds it. fails: function -> what it answers."""

    def __init__(self) -> None:
        self.supported, self.fails = 1, {}
        self.sizes: dict[int, int] = {}  # of handles
        self.reserved: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}
        self.mapped: dict[int, int] = {}  # address -> size
        self.accessible: set[int] = set()
        self.handles = iter(range(7, 10_000))
        self.by_handle: dict[int, int] = {}  # handle -> address where it is mapped
        for name, arguments in SIGNATURES.items():
            function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._answer(name))
            setattr(self, name, function)

    def _answer(self, name: str) -> Callable[..., int]:
        work = getattr(self, "_" + name)

        def answer(*arguments: Any) -> int:
            return self.fails.get(name, 0) or work(*arguments) or 0

        return answer

    @property
    def taken(self) -> int:
        return sum(self.mapped.values()) + sum(
            size for handle, size in self.sizes.items() if handle not in self.by_handle
        )

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value[0] = self.supported
        return 0 if (attribute, device) == (102, NUMBER) else INVALID_VALUE

    def _cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> int:
        size[0] = PAGE
        return 0 if option == 0 else INVALID_VALUE

    def _cuMemAddressReserve(self, address: Any, size: int, alignment: int, wanted: int, flags: int) -> int:
        if size % PAGE or alignment or wanted or flags:
            return INVALID_VALUE
        memory = (ctypes.c_ubyte * size)()
        address[0] = ctypes.addressof(memory)
        self.reserved[ctypes.addressof(memory)] = memory
        return 0

    def _cuMemAddressFree(self, address: int, size: int) -> int:
        return INVALID_VALUE if address in self.mapped or len(self.reserved.pop(address)) != size else 0

    def _cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        p = properties[0]
        if (p.type, p.handle_types, p.location.type, p.location.id, p.win32) != (1, 0, 1, NUMBER, None) or size % PAGE:
            return INVALID_VALUE
        if self.taken + size > ROOM:
            return OUT_OF_MEMORY
        handle[0] = next(self.handles)
        self.sizes[handle[0]] = size
        return 0

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        if address in self.mapped or offset or flags or self.sizes[handle] != size:
            return INVALID_VALUE
        self.mapped[address], self.by_handle[handle] = size, address
        return 0

    def _cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> int:
        a = access[0]
        if (a.location.type, a.location.id, a.flags, count) != (1, NUMBER, 3, 1) or self.mapped.get(address) != size:
            return INVALID_VALUE
        self.accessible.add(address)
        return 0

    def _cuMemUnmap(self, address: int, size: int) -> int:
        if self.mapped.get(address) != size:
            return INVALID_VALUE
        del self.mapped[address]
        self.accessible.discard(address)
        return 0

    def _cuMemRelease(self, handle: int) -> int:
        return 0 if self.sizes.pop(handle, None) else INVALID_VALUE

    def _cuGetErrorName(self, code: int, name: Any) -> int:
        name[0] = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY"}.get(code, b"CUDA_ERROR")
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimulatedDriver:
    """In place of the driver, and of what torch asks it."""
    simulated = SimulatedDriver()
    monkeypatch.setattr(device_memory, "_driver", lambda: simulated)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (ROOM - simulated.taken, ROOM))

    def tensor(self: DeviceMemory, owner: Reserved) -> Tensor:
        assert owner.address in simulated.accessible
        return torch.frombuffer((ctypes.c_ubyte * owner.num_bytes).from_address(owner.address), dtype=torch.uint8)

    monkeypatch.setattr(DeviceMemory, "tensor", tensor)
    return simulated


def device() -> DeviceMemory:
    return DeviceMemory(torch.device("cuda", NUMBER))


def test_structures_are_laid_out_as_in_cudas_header() -> None:
    """Sizes and offsets that a C compiler gives them on a 64-bit machine."""
    assert [ctypes.sizeof(x) for x in (Location, Properties, Access)] == [8, 32, 12]
    offsets = [getattr(Properties, name).offset for name in ("type", "handle_types", "location", "win32", "flags")]
    assert offsets == [0, 4, 8, 16, 24] and Access.flags.offset == 8


def test_memory_is_held_by_its_mapping_alone(driver: SimulatedDriver) -> None:
    space = device()
    assert space.page_bytes == PAGE and not driver.reserved and not driver.taken  # what it tried is gone
    one = Reserved(PAGE + 1, space)
    for _ in range(20):
        one.map()
        assert driver.mapped == {one.address: 2 * PAGE} and driver.accessible == {one.address} and not driver.sizes
        one.unmap()
        assert not driver.taken
    del one
    assert not driver.reserved


def test_a_lack_of_memory_is_torchs_error_with_numbers(driver: SimulatedDriver) -> None:
    space = device()
    held, more = Reserved(3 * PAGE, space), Reserved(2 * PAGE, space)
    held.map()
    with pytest.raises(torch.OutOfMemoryError, match=r"8,192 bytes for the engine's weights: 4,096 of 16,384 are free"):
        more.map()
    held.unmap()
    more.map()
    assert driver.taken == 2 * PAGE


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_what_fails_on_the_way_leaves_nothing_mapped(driver: SimulatedDriver, function: str) -> None:
    one = Reserved(1, device())
    driver.fails[function] = INVALID_VALUE
    with pytest.raises(DriverError, match=rf"^{function}: CUDA_ERROR_INVALID_VALUE \(1\)$"):
        one.map()
    assert not one.is_mapped and not driver.taken
    driver.fails.clear()
    one.map()
    assert driver.taken == PAGE


def test_a_device_without_it_says_why(driver: SimulatedDriver) -> None:
    driver.supported = 0
    with pytest.raises(EnvironmentProblem, match="on cuda:3: the device has no virtual memory management"):
        device()
    driver.supported = 1
    driver.fails["cuMemAddressReserve"] = 801
    with pytest.raises(EnvironmentProblem, match=r"on cuda:3: cuMemAddressReserve: CUDA_ERROR \(801\)"):
        device()
    assert not driver.reserved and not driver.taken


def test_a_machine_without_a_driver_says_why(driver: SimulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(device_memory, "_driver", missing)
    with pytest.raises(EnvironmentProblem, match=r"libcuda\.so\.1: cannot open"):
        device()
    with pytest.raises(EnvironmentProblem, match="memory of a cpu"):
        reserved_space(torch.device("cpu"))
