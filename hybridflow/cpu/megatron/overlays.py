"""megatron-core where there is no CUDA, or where the CPU is chosen beside it.

megatron names CUDA in four ways: `torch.cuda.current_device()` and the like, factories with device="cuda",
`Tensor.cuda()`, and comparing `Tensor.type()` with 'torch.cuda.*'. Each is answered for megatron's own modules; the
real torch module stays untouched.
"""

import functools
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from hybridflow.cpu.megatron import flat_buffers, weight_gradients
from hybridflow.cpu.megatron.allocator import keep_freed_memory
from hybridflow.cpu.megatron.products import use_fast_products

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
        buffers.__dict__["dist_all_gather_func"] = flat_buffers.all_gather_into_tensor
        buffers.__dict__["dist_reduce_scatter_func"] = flat_buffers.reduce_scatter_tensor
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
