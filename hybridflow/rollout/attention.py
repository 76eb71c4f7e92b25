"""Which attention backend the engine will take, told without importing vLLM.

From vLLM 0.32.0, `get_attn_backend_cls` of platforms/cpu.py and `_get_backend_priorities` of platforms/cuda.py: the
first of a list that takes the dtype.
"""

HALF_PRECISION_ONLY = ("FLASH_ATTN", "FLASHINFER")
CUDA_ORDER = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
BLACKWELL_ORDER = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN")


def engine_attention(capability: tuple[int, int] | None, dtype: str) -> str:
    """The name that vLLM gives it. capability: of the GPU, None on a CPU; dtype: "float32" or "bfloat16"."""
    if capability is None:
        return "CPU_ATTN"
    order = BLACKWELL_ORDER if capability[0] == 10 else CUDA_ORDER
    return next(name for name in order if dtype != "float32" or name not in HALF_PRECISION_ONLY)
