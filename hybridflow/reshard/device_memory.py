"""The addresses and the memory of a GPU, by CUDA's driver: what `reserved` asks for.

    cuMemAddressReserve                                 a range of addresses, once
    cuMemCreate, cuMemMap, cuMemSetAccess, cuMemRelease    memory, and there it is; the mapping alone keeps it then
    cuMemUnmap                                          and gone
    cuMemAddressFree                                    when nobody can ask for it any more

Why not vLLM's allocator, which does the same for sleep mode (vllm.device_allocator.cumem, 0.32.0): vLLM's is one object
a process, and sleep() unmaps all that vLLM allocated, whichever tag; the engine sleeps *before* the weights go to
the trainer. The extension maps, but reserves only through that object; a lack of memory differs from other errors by
text alone, after which torch's cache has to be emptied; and `reshard` knows nothing of vLLM. vLLM notes that the
driver by ctypes failed for them, by a context; the calls that make and map memory name a device and ask for no context
(by the documentation), torch loads kernels in this way (torch.cuda._utils), and a page is tried first.

- Ranks: memory is accessible to the rank's device. NCCL copies through NCCL's buffers from and to memory that was not
  registered with it, and weights are not; graphs capture collectives of activations alone.
- expandable_segments of torch's allocator do not matter: this memory is not torch's, and in none of torch's statistics.
- Pages are of 2 MiB, of which a bucket takes whole ones.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.exchange import Exchange
from hybridflow.reshard.reserved import AddressSpace, Reserved

LIBRARY = "libcuda.so.1"
# of cuda.h
OUT_OF_MEMORY = 2
SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
PINNED, DEVICE, READ_AND_WRITE, MINIMUM = 1, 1, 3, 0
SIZE, ADDRESS, HANDLE, FLAGS = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),  # compression, RDMA, usage: none
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(SIZE), ctypes.POINTER(Properties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(ADDRESS), SIZE, SIZE, ADDRESS, FLAGS),
    "cuMemAddressFree": (ADDRESS, SIZE),
    "cuMemCreate": (ctypes.POINTER(HANDLE), SIZE, ctypes.POINTER(Properties), FLAGS),
    "cuMemMap": (ADDRESS, SIZE, SIZE, HANDLE, FLAGS),
    "cuMemSetAccess": (ADDRESS, SIZE, ctypes.POINTER(Access), SIZE),
    "cuMemUnmap": (ADDRESS, SIZE),
    "cuMemRelease": (HANDLE,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class DriverError(RuntimeError):
    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({code})")
        self.code = code


class DeviceMemory:
    """`AddressSpace` of a GPU that torch computes on.

    Errors: EnvironmentProblem, with the reason, where it cannot be had: a driver or a device without it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # torch has the driver ready
        number = torch.cuda.current_device() if device.index is None else device.index
        self._number = number
        location = Location(DEVICE, number)
        self._properties, self._access = Properties(PINNED, 0, location), Access(location, READ_AND_WRITE)
        try:
            supported, page = ctypes.c_int(), SIZE()
            _call("cuDeviceGetAttribute", ctypes.byref(supported), SUPPORTED, number)
            if not supported.value:
                raise RuntimeError("the device has no virtual memory management")
            _call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(self._properties), MINIMUM)
            self.page_bytes = page.value
            self._try()
        except (OSError, AttributeError, RuntimeError) as error:
            raise EnvironmentProblem(f"CUDA's driver does not map memory on {device}: {error}") from error

    def _try(self) -> None:
        """A page, there and back. Errors: RuntimeError, of the driver or of torch."""
        one = Reserved(1, self)
        one.map()
        if one.tensor().fill_(1).item() != 1:
            raise RuntimeError("a page of mapped memory does not hold the written value")
        one.unmap()

    def reserve(self, size: int) -> int:
        address = ADDRESS()
        _call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value

    def map(self, address: int, size: int) -> None:
        handle = HANDLE()
        try:
            _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            free, total = torch.cuda.mem_get_info(self._device)
            raise torch.OutOfMemoryError(
                f"{size:,} bytes for the engine's weights: {free:,} of {total:,} are free on {self._device}"
            ) from error
        try:
            _call("cuMemMap", address, size, 0, handle, 0)
        finally:
            _call("cuMemRelease", handle)  # what is mapped stays until it is unmapped
        try:
            _call("cuMemSetAccess", address, size, ctypes.byref(self._access), 1)
        except DriverError:
            _call("cuMemUnmap", address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        torch.cuda.synchronize(self._device)  # the driver does not wait for kernels that still read there
        _call("cuMemUnmap", address, size)

    def free(self, address: int, size: int) -> None:
        _call("cuMemAddressFree", address, size)

    def reclaim(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def tensor(self, owner: Reserved) -> Tensor:
        tensor = torch.as_tensor(_Window(owner), device=torch.device("cuda", self._number))
        if tensor.data_ptr() != owner.address:
            raise RuntimeError("torch has copied what it was to look at")
        return tensor


class _Window:
    """What torch takes for an array on the device; the tensor keeps it, and it the addresses."""

    def __init__(self, owner: Reserved) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (owner.num_bytes,),
            "typestr": "|u1",
            "data": (owner.address, False),
            "strides": None,
            "version": 2,
        }


def reserved_space(device: torch.device) -> AddressSpace:
    """Errors: EnvironmentProblem, with the reason, where memory has no addresses that stay."""
    if device.type != "cuda":
        raise EnvironmentProblem(f"memory of a {device.type} is reserved for no one")
    return DeviceMemory(device)


@functools.cache
def _driver() -> ctypes.CDLL:
    """Errors: OSError where there is none, AttributeError where it is older than these functions."""
    library = ctypes.CDLL(LIBRARY)
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def _call(function: str, *arguments: Any) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise DriverError(function, code, (name.value or b"an unknown error").decode())


def reserve_address_space(device: torch.device, exchange: Exchange) -> tuple[AddressSpace | None, str | None]:
    """Reserve addresses at which memory comes and goes, for CUDA graphs; where a rank cannot, none and why.

    Collective over the world: some ranks of an engine would else capture graphs, and others not.
    """
    space: AddressSpace | None = None
    why = "gathered weights have no fixed addresses on another rank"
    try:
        space = reserved_space(device)
    except EnvironmentProblem as problem:
        why = f"gathered weights have no fixed addresses: {problem}"
    missing = exchange.maximum(torch.tensor(int(space is None), device=exchange.device))
    return (None, why) if int(missing) else (space, None)
