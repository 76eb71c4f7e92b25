"""Which attention backend the engine will take, found without importing vLLM.

From vLLM 0.32.0, `get_attn_backend_cls` of platforms/cpu.py and `_get_backend_priorities` of platforms/cuda.py: the
first of a list that takes the dtype.
"""

from hybridflow.architecture.spec import ModelSpec
from hybridflow.errors import ConfigError

# sizes that vLLM's kernel on CPUs is compiled for: beside those that its class names 48. It plans each step for all of
# a size, also where hybridflow's kernel computes
CPU_HEADS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
MOST_OF_FLASH, LEAST_OF_TRITON = 256, 32  # sizes of a head; flash attention takes multiples of 8
LATENT_SIZES = (512, 64)  # kv_lora_rank and qk_rope_head_dim
HALF_PRECISION_ONLY = ("FLASH_ATTN", "FLASHINFER")
CUDA_ORDER = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
BLACKWELL_ORDER = ("FLASHINFER", "FLASH_ATTN", "TRITON_ATTN")


def engine_attention(capability: tuple[int, int] | None, dtype: str) -> str:
    """The name that vLLM gives it. capability: of the GPU, None on a CPU; dtype: "float32" or "bfloat16"."""
    if capability is None:
        return "CPU_ATTN"
    order = BLACKWELL_ORDER if capability[0] == 10 else CUDA_ORDER
    return next(name for name in order if dtype != "float32" or name not in HALF_PRECISION_ONLY)


def check_head_size(spec: ModelSpec, dtype: str, *, cuda: bool) -> None:
    """Errors: ConfigError where no attention of the engine takes the heads of the actor's model."""
    if spec.latent is not None:
        return _check_latent(spec, dtype, cuda=cuda)
    size = spec.head_dim
    if cuda:
        flash = dtype != "float32" and size % 8 == 0 and size <= MOST_OF_FLASH
        fits, which = flash or size >= LEAST_OF_TRITON, f"{LEAST_OF_TRITON} or more, and in 16 bits multiples of 8"
    else:
        fits, which = size in CPU_HEADS, f"of {', '.join(map(str, CPU_HEADS))}"
    if not fits:
        where = "GPUs" if cuda else "CPUs"
        hint = "" if cuda else ". For a plan of GPUs set platform=cuda"
        raise ConfigError(
            f"actor.model: {spec.path} has heads of {size} (head_dim). vLLM generates on {where} with heads {which} "
            f"alone{hint}"
        )


def _check_latent(spec: ModelSpec, dtype: str, *, cuda: bool) -> None:
    assert spec.latent is not None, f"{spec.family} has no latent attention"
    sizes = spec.latent
    if (sizes.key_rank, sizes.rotary_dim) != LATENT_SIZES:
        raise ConfigError(
            f"actor.model: {spec.path} has kv_lora_rank {sizes.key_rank} and qk_rope_head_dim {sizes.rotary_dim}. "
            f"vLLM's latent attention has kernels for {LATENT_SIZES[0]} and {LATENT_SIZES[1]} alone"
        )
    if cuda and dtype == "float32":
        raise ConfigError(
            f"actor.dtype = float32: vLLM's latent attention on GPUs, which {spec.path} needs, knows 16 bits alone"
        )
