"""Flash attention: whether there is any, and what training and the engine will use."""

import torch

from hybridflow.architecture.spec import read_spec
from hybridflow.config import ExperimentConfig
from hybridflow.inspection.findings import Finding
from hybridflow.parallel.device import FIRST_WITH_FLASH, uses_cuda
from hybridflow.rollout.runner import check_head_size, engine_attention

AREA = "attention"


def is_flash_attn_available() -> bool:
    """Whether training can run torch's variable-length flash attention here: on a GPU, with a torch built with it."""
    if not uses_cuda():
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability() >= FIRST_WITH_FLASH


def training_attention(dtype: str, *, cuda: bool) -> str:
    """What `models.attention` takes: flash attention knows 16-bit types alone."""
    flash = cuda and dtype != "float32"
    return "torch varlen_attn (flash attention)" if flash else "torch scaled_dot_product_attention"


def check_heads(config: ExperimentConfig) -> None:
    """Errors: ConfigError where the engine of a run has no attention for the heads of the actor."""
    spec, cuda = read_spec(config.actor.model), uses_cuda(config.platform)
    check_head_size(spec, config.actor.dtype, cuda=cuda)


def attention_in_use(dtype: str) -> dict[str, str]:
    """The backend of training and that of the engine, for an actor of this dtype on this process's device."""
    cuda = uses_cuda()
    capability = torch.cuda.get_device_capability() if cuda else None
    return {
        "training": training_attention(dtype, cuda=cuda),
        "rollout": f"vLLM {engine_attention(capability, dtype)}",
    }


def attention_findings(available: bool, in_use: dict[str, str], host: str, *, cuda: bool) -> list[Finding]:
    """cuda: whether the host computes on GPUs, where going without flash attention is worth a warning."""
    value = "available" if available else "not available" if cuda else "not available; for GPUs only"
    advice = "needs a GPU of compute capability 8.0 or more and a torch built with flash attention"
    missing = cuda and not available
    return [
        Finding(AREA, "flash attention", host, value, "warn" if missing else "ok", advice=advice if missing else ""),
        *(Finding(AREA, moment, host, backend) for moment, backend in in_use.items()),
    ]
