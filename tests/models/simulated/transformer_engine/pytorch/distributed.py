"""Random states and recomputation, which this library's models ask of megatron alone."""

from contextlib import nullcontext

activation_recompute_forward = nullcontext


class CudaRNGStatesTracker:
    def reset(self) -> None: ...


def checkpoint(*args: object, **kwargs: object) -> object:
    raise NotImplementedError("recomputation by Transformer Engine is not simulated")


def is_fp8_activation_recompute_enabled() -> bool:
    return False
