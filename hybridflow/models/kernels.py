"""Which kernels training takes on GPUs, for people: one line when a run starts, with what was not taken and why.

The choices are made in `layer_classes` (layers, gradient accumulation), `attention_backends` and megatron (Adam).
"""

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import megatron.core.optimizer as megatron_optimizer
import torch
from torch.nn.attention import current_flash_attention_impl

from hybridflow.models.attention_backends import why_not_flash3
from hybridflow.parallel.device import FIRST_WITH_FLASH

OptimizerSource = Literal["Transformer Engine", "apex", "torch"]


@dataclass(frozen=True)
class KernelFacts:
    """Of this process. no_...: why it cannot be imported; None where it can."""

    no_transformer_engine: str | None
    no_gradient_accumulation: str | None
    capability: tuple[int, int]
    flash_built: bool  # torch was built with flash attention
    flash_activated: str | None  # another one that is active in torch, as FA3
    no_flash3: str | None  # why it is not; None where it is active
    optimizer: OptimizerSource
    no_deep_ep: str | None = None


def kernel_facts() -> KernelFacts:
    """Asks the packages and the GPU: for CUDA alone."""
    no_flash3 = why_not_flash3()  # or activates it
    return KernelFacts(
        no_transformer_engine=why_not("transformer_engine"),
        no_gradient_accumulation=why_not("fused_weight_gradient_mlp_cuda"),
        capability=torch.cuda.get_device_capability(),
        flash_built=torch.backends.cuda.is_flash_attention_available(),
        flash_activated=current_flash_attention_impl(),
        no_flash3=no_flash3,
        optimizer=optimizer_source(vars(megatron_optimizer)["Adam"]),
        no_deep_ep=why_not("deep_ep"),
    )


def why_not(module: str) -> str | None:
    """What importing says: the word that megatron goes by, so that a package which is there and broken is none."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error) or f"{module} cannot be imported"
    return None


def optimizer_source(adam: type) -> OptimizerSource:
    """Whose the class is that megatron has found for Adam."""
    package = adam.__module__.partition(".")[0]
    sources: dict[str, OptimizerSource] = {"transformer_engine": "Transformer Engine", "apex": "apex"}
    return sources.get(package, "torch")


def kernel_line(
    facts: KernelFacts,
    dtypes: Mapping[str, str],
    *,
    adam: bool,
    fused: Collection[str] = (),
    sending: Mapping[str, str] | None = None,
) -> str:
    """dtypes: of the models of the run by their names. adam: whether one of them is trained by it.

    fused: models that ask for cuDNN's attention. sending: `token_dispatcher` of models whose replicas share experts.
    """
    parts = [_layers(facts), _gradient_accumulation(facts), *_attention(facts, dtypes, fused)]
    parts += [_dispatcher(facts, name, wanted) for name, wanted in (sending or {}).items()]
    return "kernels for training: " + "; ".join(parts + [_optimizer(facts)] * adam)


def _layers(facts: KernelFacts) -> str:
    if facts.no_transformer_engine is None:
        return "layers of Transformer Engine"
    return f"layers of megatron without Transformer Engine ({facts.no_transformer_engine})"


def _gradient_accumulation(facts: KernelFacts) -> str:
    engine, missing = facts.no_transformer_engine is None, facts.no_gradient_accumulation
    if missing is None:
        return "gradient accumulation fused by " + ("Transformer Engine and apex" if engine else "apex")
    if engine:
        return (
            f"gradient accumulation fused by Transformer Engine, but for the output layer, which takes apex ({missing})"
        )
    return f"gradient accumulation not fused, which takes Transformer Engine or apex ({missing})"


def _attention(facts: KernelFacts, dtypes: Mapping[str, str], fused: Collection[str]) -> list[str]:
    parts, whole = [], [name for name, dtype in dtypes.items() if dtype == "float32"]
    by_cudnn = [name for name in dtypes if name in fused and name not in whole]
    if len(whole) + len(by_cudnn) < len(dtypes):
        parts.append(f"attention by {_flash(facts)}")
    if by_cudnn:
        parts.append(f"attention of {', '.join(by_cudnn)} by cuDNN through Transformer Engine")
    if whole:
        parts.append(f"attention of {', '.join(whole)} by torch's scaled_dot_product_attention (flash takes 16 bits)")
        tf32 = "with" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "without"
        parts.append(f"products of {', '.join(whole)} {tf32} TF32")
    return parts


def _dispatcher(facts: KernelFacts, name: str, wanted: str) -> str:
    way = f"tokens of {name} go to experts of other replicas by"
    if wanted == "alltoall":
        return f"{way} all-to-all"
    return f"{way} DeepEP" if facts.no_deep_ep is None else f"{way} all-to-all, not DeepEP ({facts.no_deep_ep})"


def _flash(facts: KernelFacts) -> str:
    if facts.flash_activated is not None:
        return f"flash attention {facts.flash_activated.removeprefix('FA')}, active in torch"
    if not facts.flash_built:
        return "flash attention, which this torch was not built with: training will fail"
    if facts.capability < FIRST_WITH_FLASH:
        have, least = (".".join(map(str, version)) for version in (facts.capability, FIRST_WITH_FLASH))
        return f"flash attention, for which compute capability {have} is below {least}: training will fail"
    return f"flash attention 2 of torch (not 3: {facts.no_flash3})"


def _optimizer(facts: KernelFacts) -> str:
    if facts.optimizer == "torch":
        return "Adam of torch, fused (Transformer Engine and apex have none here)"
    return f"Adam of {facts.optimizer}"
