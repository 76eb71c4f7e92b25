"""Which of vLLM 0.32.0's two model runners an engine gets. vLLM would choose by itself; here hybridflow does.

The older one (V1) runs everywhere. The newer one (V2) needs Triton, knows no pipeline of stages that torchrun has
started, and holds at most so many ids of a request in tables: with more it fails at the first request, when
everything is loaded. It schedules the next step while the GPU computes one, and draws other tokens from a seed than V1.

Which attention backend the engine takes is found without vLLM: the first of a list that takes the dtype, as in
`get_attn_backend_cls` of platforms/cpu.py and `_get_backend_priorities` of platforms/cuda.py.
"""

import functools
import os

from hybridflow.architecture.spec import ModelSpec
from hybridflow.config import SamplingConfig
from hybridflow.errors import ConfigError, remedy

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# what V2's tables hold of a request (v1/worker/gpu/sample/logit_bias.py); end tokens of the model are stops as well
MOST_ALLOWED_TOKEN_IDS, MOST_LOGIT_BIASES, MOST_STOPS = 1024, 1024, 128
ROOM_FOR_ENDS = 32


def choose_runner(sampling: SamplingConfig, *, cuda: bool, triton: bool, pp: int, cuts_routes: bool = False) -> bool:
    """Set the variable that vLLM reads when it builds an engine. Whether that is V2.

    Where V2 would do, a 0 that a user had set before the first engine makes it V1.
    """
    wish = _wish()  # before it is overwritten
    able = triton and second_runner(sampling, cuda=cuda, pp=pp, cuts_routes=cuts_routes)
    second = able and wish != "0"
    os.environ[VARIABLE] = "1" if second else "0"
    return second


def second_runner(sampling: SamplingConfig, *, cuda: bool, pp: int, cuts_routes: bool = False) -> bool:
    """Whether V2 can do what is asked; the tables hold what each request says.

    cuts_routes: the experts of requests that are aborted count, and V2 returns none of these.
    """
    return (
        cuda
        and pp == 1
        and not cuts_routes
        and len(sampling.allowed_token_ids or ()) <= MOST_ALLOWED_TOKEN_IDS
        and len(sampling.logit_bias or ()) <= MOST_LOGIT_BIASES
        and len(sampling.stop_token_ids) <= MOST_STOPS - ROOM_FOR_ENDS
    )


@functools.cache
def _wish() -> str | None:
    """What the user had set: asked once, for later it is our own word."""
    return os.environ.get(VARIABLE)


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
            f"{remedy({'actor.dtype': ['bfloat16']})}"
        )
