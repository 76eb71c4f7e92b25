"""megatron-core where there is no CUDA, or where the CPU is chosen beside it.

megatron names CUDA in four ways: `torch.cuda.current_device()` and the like, factories with device="cuda",
`Tensor.cuda()`, and comparing `Tensor.type()` with 'torch.cuda.*'. Each is answered for megatron's own modules; the
real torch module stays untouched.

Three things are done otherwise. Memory that tensors free is used again, not given back to the system: fresh memory
costs page faults. torch's functions that exchange flat buffers are replaced: gloo adds up all gradients on every rank,
while here a rank reads its part in the others' memory, or by an all-to-all where it cannot. A sum is that of the ranks
in their order either way. Gradients of weights are added to their buffers by `weight_gradients`.
"""

import ctypes
import functools
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.cpu import peer_memory
from hybridflow.cpu.megatron import weight_gradients
from hybridflow.cpu.megatron.products import use_fast_products
from hybridflow.cpu.peer_memory import PeerRectangle

CPU = torch.device("cpu")


def prepare() -> None:
    """Settings that must stand before torch._dynamo, megatron-core or vLLM are imported.

    megatron's `jit_fuser` is torch.compile: on a CPU it compiles for seconds to gain nothing.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read by vLLM
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    import torch._dynamo.config

    torch._dynamo.config.disable = True  # the environment is read only once, and that may be past
    keep_freed_memory()
    use_fast_products()


def adapt() -> None:
    """Let every megatron module loaded so far run without CUDA. May be called again."""
    _adapt_modules(len(sys.modules))
    if torch.Tensor.cuda is not _stay:
        for name, method in {"cuda": _stay, "type": _type_for_megatron(torch.Tensor.type)}.items():
            setattr(torch.Tensor, name, method)


@functools.lru_cache(maxsize=1)
def _adapt_modules(num_modules: int) -> None:
    """Of `num_modules` loaded ones those of megatron. As long as none is added nothing is left to do: every model and
    every optimizer asks, and going through thousands of names takes milliseconds.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = TORCH
    buffers = sys.modules.get("megatron.core.distributed.param_and_grad_buffer")
    if buffers is not None:
        buffers.__dict__["dist_all_gather_func"] = all_gather_into_tensor
        buffers.__dict__["dist_reduce_scatter_func"] = reduce_scatter_tensor
    layers = sys.modules.get("megatron.core.tensor_parallel.layers")
    if layers is not None:
        layers.__dict__["fused_weight_gradient_mlp_cuda"] = weight_gradients
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    if random is not None:
        random.__dict__["_get_cuda_rng_state"] = _get_rng_state
        random.__dict__["_set_cuda_rng_state"] = _set_rng_state
        logging.getLogger(random.__name__).setLevel(logging.ERROR)  # it warns that the CPU state changed


def _get_rng_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _stay(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Tensor.cuda() where there is no CUDA: megatron moves tied embeddings with it."""
    return self


def _type_for_megatron(real: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type() that answers 'torch.cuda.*' to megatron, whose optimizers accept nothing else."""

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real(self, *args, **kwargs)
        asked_by_megatron = sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core")
        if asked_by_megatron and isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_name


class _CudaOnCpu(types.ModuleType):
    """torch.cuda as megatron sees it where there is none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        return False

    def current_device(self) -> torch.device:
        return CPU

    def synchronize(self, *args: object) -> None:
        """Nothing is asynchronous on a CPU."""

    def current_stream(self, *args: object) -> None:
        """0.19.2 asks before it sums gradients, for what CUDA graphs would wait for."""

    def empty_cache(self) -> None:
        """There is no caching allocator on a CPU."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def get_device_capability(self, *args: object) -> tuple[int, int]:
        return (0, 0)


class _TorchOnCpu(types.ModuleType):
    """torch as megatron sees it where there is no CUDA: factories asked for "cuda" allocate on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CudaOnCpu("torch.cuda")
        for name in ("zeros", "ones", "empty", "tensor", "arange", "full", "rand", "randn"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return build


TORCH = _TorchOnCpu()


TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Of this process, from now on, where the C library is glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)  # the most it takes; larger tensors are mapped one by one
        libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(TOP_PAD, 64 << 20)


CHUNK_BYTES = 1 << 19  # of a sum: stays in a core's cache

_processes: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]]" = weakref.WeakKeyDictionary()


def all_gather_into_tensor(output: Tensor, own: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> Any:
    """output: the `own` of all ranks in their order, contiguous; `own` may be this rank's part of it."""
    processes = () if async_op or group.size() == 1 else _readable(group)
    if not processes:
        return dist.all_gather_into_tensor(output, own, group=group, async_op=async_op)
    parts, rank = output.view(-1).chunk(len(processes)), group.rank()
    places = _tell(own.data_ptr(), group)
    for peer in _others(group):
        peer_memory.read(processes[peer], [PeerRectangle(places[peer], own.nbytes, parts[peer])])
    if parts[rank].data_ptr() != own.data_ptr():
        parts[rank].copy_(own.view(-1))
    dist.barrier(group)  # until then others read


def reduce_scatter_tensor(
    output: Tensor, whole: Tensor, *, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, async_op: bool
) -> Any:
    """output: of the sum of the ranks' `whole` this rank's part; it may be that part of `whole`. Contiguous."""
    if async_op or op != dist.ReduceOp.SUM or group.size() == 1:
        return dist.reduce_scatter_tensor(output, whole, op=op, group=group, async_op=async_op)
    processes, rank, parts = _readable(group), group.rank(), whole.view(-1).chunk(group.size())
    if not processes:
        gathered = torch.empty_like(whole).view(-1)
        dist.all_to_all_single(gathered, whole.view(-1), group=group)
        first, *others = gathered.chunk(group.size())
        for other in others:
            first += other
        output.view(-1).copy_(first)
        return None
    places = _tell(whole.data_ptr(), group)
    step = CHUNK_BYTES // whole.element_size()
    total, other = whole.new_empty(2, min(step, output.numel()))
    for start in range(0, output.numel(), step):
        count = min(step, output.numel() - start)
        for peer, process in enumerate(processes):
            into = (other if peer else total)[:count]
            if peer == rank:
                into.copy_(parts[rank][start : start + count])
            else:
                place = places[peer] + (rank * output.numel() + start) * whole.element_size()
                peer_memory.read(process, [PeerRectangle(place, into.nbytes, into)])
            if peer:
                total[:count] += into
        output.view(-1)[start : start + count] = total[:count]
    dist.barrier(group)
    return None


def _readable(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The processes of the ranks, if each can read in the memory of all; else none. Collective the first time."""
    if group not in _processes:
        own = peer_memory.introduction()
        introductions = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(introductions, own, group=group)
        everybody = all(peer_memory.can_read(x) for x in introductions)
        agreed = all(_tell(int(everybody), group))
        _processes[group] = tuple(int(x[1]) for x in introductions) if agreed else ()
    return _processes[group]


def _tell(number: int, group: dist.ProcessGroup) -> list[int]:
    """Those of all ranks. Not by torch's all_gather_into_tensor, which megatron's context for many would put off."""
    numbers = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(numbers, torch.tensor([number]), group=group)
    return [int(x) for x in numbers]


def _others(group: dist.ProcessGroup) -> list[int]:
    """From the next on: no rank is read by all at once."""
    rank, size = group.rank(), group.size()
    return [(rank + k) % size for k in range(1, size)]
