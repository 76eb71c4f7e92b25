"""Where this process computes: on CUDA devices or on the CPU. Chosen once, before anything is loaded; all others ask.

A CUDA build of torch whose driver is broken or sees no device answers `torch.cuda.is_available()` with False, as a CPU
build does. Nobody who has such a machine means to train on the CPU: that is an error, unless the config says `cpu`.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.layout import PlatformName

CPU = torch.device("cpu")
FIRST_WITH_FLASH = (8, 0)  # compute capability of the first GPUs with flash attention: Ampere
CHOSEN = "HYBRIDFLOW_PLATFORM"  # in the environment, so that it holds for the processes that this one starts, too


def choose_platform(platform: PlatformName) -> None:
    """Settle where this process computes. Comes before CUDA is used for the first time; may be called again.

    auto: what was chosen before, else CUDA where torch is built for it. Errors: EnvironmentProblem, with what torch
    says, where a CUDA device is asked for, or torch is built for CUDA, and torch sees none.
    """
    if platform == "cpu":
        os.environ[CHOSEN] = "cpu"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for packages that ask torch, or CUDA itself
        return
    if platform == "auto" and (torch.version.cuda is None or os.environ.get(CHOSEN) == "cpu"):
        return
    reason = why_no_cuda()
    if reason is not None:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        raise EnvironmentProblem(
            f"platform: {platform}: torch {torch.__version__}, built for {built}, sees no CUDA device: {reason}. "
            "`platform: cpu` in the config trains on CPUs"
        )
    os.environ.pop(CHOSEN, None)


def why_no_cuda() -> str | None:
    """What torch says where it sees no CUDA device; None where it sees one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        for warning in caught:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return None
    said = [str(warning.message) for warning in caught]
    try:
        torch.cuda.init()  # torch warns but once a process; this tells it each time
    except (RuntimeError, AssertionError) as error:
        said.append(str(error))
    return "; ".join(dict.fromkeys(said)) or "torch gives no reason"


def uses_cuda(platform: PlatformName = "auto") -> bool:
    """Whether this process computes on CUDA devices; `platform`: whether it would, where that is chosen."""
    if platform != "auto":
        return platform == "cuda"
    return os.environ.get(CHOSEN) != "cpu" and torch.cuda.is_available()


def num_devices() -> int | None:
    """CUDA devices of this host that a run would use; None where it computes on the CPU."""
    return torch.cuda.device_count() if uses_cuda() else None


def current_device() -> torch.device:
    """Where this rank computes, once the rank's device is set."""
    return torch.device("cuda", torch.cuda.current_device()) if uses_cuda() else CPU


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all queued work: a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def named_range(name: str) -> AbstractContextManager[Any]:
    """The block by this name in a trace of torch's profiler, and on CUDA in one of Nsight Systems (NVTX)."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return torch.cuda.nvtx.range(name) if uses_cuda() else nullcontext()


def device_name() -> str:
    """For people: what this rank computes on."""
    return f"CUDA ({torch.cuda.get_device_name()})" if uses_cuda() else "CPU"


def to_host_async(numbers: torch.Tensor) -> Callable[[], list[int]]:
    """Of (n,) integers on the device: what reads them on the host. A GPU's copy is under way until then."""
    if not numbers.is_cuda:
        return numbers.tolist
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        found: list[int] = there.tolist()
        return found

    return read
