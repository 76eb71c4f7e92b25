"""A device that computes nothing, and an error where the host would wait for it.

The device is torch's `meta`, whose tensors have shapes and no numbers, in the place of CUDA: torch built for CPUs
cannot index a fake tensor that says `cuda`. What asks for a number raises; so does what a GPU would do at the price of
a wait: copies to the host, copies from pageable memory, results whose size depends on numbers.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.cpu.megatron import overlays
from hybridflow.models import build, layer_classes
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import vocab

DEVICE = torch.device("meta")
NUMBERS = frozenset(
    "_local_scalar_dense is_nonzero item equal nonzero _unique _unique2 unique_dim unique_consecutive masked_select "
    "bincount repeat_interleave".split()
)
INDEXING = frozenset("index index_put index_put_ _index_put_impl_".split())
FACTORIES = (torch.tensor, torch.as_tensor)


class HostWait(AssertionError):
    """The host would wait for the device."""


class NoHostWaits(TorchDispatchMode):
    """Within the block. operations: how many the device was given."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self._page_locked: dict[int, Tensor] = {}  # by address, which is taken once as long as the tensor is there
        self._outside = contextlib.ExitStack()

    def __enter__(self) -> Any:
        # vLLM for CPUs has another `pin_memory`
        self._outside.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor: self._pinned(tensor)))
        self._outside.enter_context(_Factories())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._outside.close()

    def _pinned(self, of: Tensor) -> Tensor:
        found = of.clone()
        return self._page_locked.setdefault(found.data_ptr(), found)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x for x in tensors if x.device == DEVICE]
        name = function.name().removeprefix("aten::").split(".")[0]
        target = kwargs.get("device")
        if name == "_to_copy" and target is not None and torch.device(target) == DEVICE and not here:
            self._check_copy(name, args[0], bool(kwargs.get("non_blocking")))
        elif here:
            self.operations += 1
            self._check(name, args, kwargs, tensors)
        return function(*args, **kwargs)

    def _check(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        target = kwargs.get("device")
        if name in NUMBERS or (name == "_to_copy" and target is not None and torch.device(target) != DEVICE):
            raise HostWait(f"{name} of a tensor on the device")
        if name in INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            raise HostWait(f"{name} by a mask on the device")
        strangers = [x for x in tensors if x.device != DEVICE and x.dim()]
        if name == "copy_" and strangers:
            into, source = args[:2]
            if into.device != DEVICE:
                raise HostWait("a copy to the host")
            self._check_copy(name, source, bool(args[2:] and args[2]) or bool(kwargs.get("non_blocking")))
        elif strangers:
            raise HostWait(f"{name} of tensors on the device and on the host")

    def _check_copy(self, name: str, source: Tensor, non_blocking: bool) -> None:
        if source.numel() and not (non_blocking and source.data_ptr() in self._page_locked):
            raise HostWait(f"{name}: a copy to the device from memory that is not page-locked, or one to wait for")


class _Factories(TorchFunctionMode):
    """Numbers of Python: on this device the dispatcher does not hear of their copy."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function in FACTORIES and device is not None and torch.device(device) == DEVICE:
            raise HostWait(f"{function.__name__} copies numbers of Python to the device")
        return function(*args, **kwargs)


class NotLaunched:
    """A Triton kernel on a device that has no memory: the host's part alone runs."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: None


@contextlib.contextmanager
def built_for_the_device() -> Iterator[None]:
    """Models built within the block are of what a GPU without Transformer Engine runs, and lie on the device."""
    with (
        mock.patch.multiple(layer_classes, uses_cuda=lambda: True, HAVE_TE=False),
        mock.patch.object(build, "current_device", lambda: DEVICE),
        mock.patch.object(overlays, "CPU", DEVICE),
        mock.patch.object(vocab, "uses_cuda", lambda: True),
        mock.patch.object(platforms, "uses_cuda", lambda: True),
        mock.patch.object(platforms, "adapt_megatron", lambda: None),
        mock.patch.object(Tensor, "type", _type),
    ):
        yield


def _type(self: Tensor, *args: Any) -> Any:
    """megatron's optimizers know CUDA's types."""
    names = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}
    return self.to(*args) if args else names[self.dtype]
