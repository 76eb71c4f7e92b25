"""What of an engine depends on the device that it computes on. Asked once for each engine, never in between."""

import os
import re
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from hybridflow.cpu.engine.device import CpuEngine
from hybridflow.parallel.device import uses_cuda
from hybridflow.rollout.cache import CudaKVCache, KVCache

if TYPE_CHECKING:
    from torch import nn
    from vllm import LLM


class EngineDevice(Protocol):
    """kind: as vLLM calls it; name: for people; backend: of the process groups, as torch calls it."""

    @property
    def kind(self) -> Literal["cuda", "cpu"]: ...
    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...

    def prepare(self) -> None:
        """Before an engine is built; may be called again."""

    def prepare_states(self, architecture: str) -> None:
        """Before an engine of a model with gated delta nets is built. architecture: of the language model."""

    def prepare_latent(self) -> None:
        """Before an engine of a model with latent attention is built; may be called again."""

    def settings(self, *, eager: bool, sleeps: bool, block_tokens: int) -> dict[str, Any]:
        """Arguments of vLLM's LLM. eager: a user wants no graphs; sleeps: the KV cache is released."""

    def kv_cache(self, llm: "LLM") -> KVCache: ...

    def finish(self, llm: "LLM", *, pp: int) -> None:
        """What follows when the engine is built. pp: the engine's pipeline stages."""

    def notes(self, model: "nn.Module") -> list[str]:
        """Lines for people on how vLLM's model computes."""


def engine_device() -> EngineDevice:
    """The one that this process computes on."""
    return CudaEngine() if uses_cuda() else CpuEngine()


class BesideATrainer(TypedDict, total=False):
    gpu_memory_utilization: float
    moe_backend: str
    enable_flashinfer_autotune: bool


# vLLM 0.32.0 refuses to start unless this share of the GPU is free, though kv_cache_memory_bytes says what it may take;
# of kernels for experts, Triton's alone reads their weights as they stand; of the linear layers and experts that it
# would time at every start (on Hopper and later) none is FlashInfer's
BESIDE_A_TRAINER: BesideATrainer = {
    "gpu_memory_utilization": 0.01,
    "moe_backend": "triton",
    "enable_flashinfer_autotune": False,
}


class CudaEngine:
    """CUDA graphs, chunked prefill, sleep mode."""

    kind: Literal["cuda"] = "cuda"
    name, backend = "CUDA", "nccl"

    def prepare(self) -> None:
        """vLLM makes a new stream the process's current one, for good, when it first asks for it.

        Asked now, models, optimizers and engine all work on that stream, and one pool of torch's allocator serves them.
        """
        from vllm.utils.torch_utils import current_stream

        current_stream()

    def prepare_states(self, architecture: str) -> None:
        """Nothing."""

    def prepare_latent(self) -> None:
        """Nothing."""

    def settings(self, *, eager: bool, sleeps: bool, block_tokens: int) -> dict[str, Any]:
        """The backend of attention says how many tokens a block has.

        Two settings of vLLM 0.32.0 that free more in sleep stay off. sleep_mode_offload_cudagraph puts graphs into
        memory that the custom all-reduce can show no other process; vLLM tells its communicator by a config that
        `join_groups` has none of. enable_nccl_comm_suspend has no counterpart for torch's communicators, and NCCL
        before 2.29.7 has it not.
        """
        return {
            "enable_chunked_prefill": True,
            "enforce_eager": eager,
            "enable_sleep_mode": sleeps,
            "compilation_config": {
                "pass_config": {"fuse_allreduce_rms": False}
            },  # by FlashInfer: see `set_environment`
            **BESIDE_A_TRAINER,
        }

    def kv_cache(self, llm: "LLM") -> KVCache:
        return CudaKVCache(llm)

    def finish(self, llm: "LLM", *, pp: int) -> None:
        """Nothing."""

    def notes(self, model: "nn.Module") -> list[str]:
        """Of a mixture by which kernels experts are computed."""
        from hybridflow.rollout.expert_kernels import expert_note

        note = expert_note(model)
        return [] if note is None else [note]


KUBERNETES = re.compile(r"(tcp|udp|sctp)://")  # of a service called vllm a pod has VLLM_PORT=tcp://10.0.0.1:8000


def set_environment() -> None:
    """May be called again."""
    for name in [name for name, value in os.environ.items() if name.startswith("VLLM_") and KUBERNETES.match(value)]:
        del os.environ[name]  # vLLM takes it for a port of its own, and ends with an error
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core runs in this process, not in a child
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # the default is 1. Every engine then imports FlashInfer before the first token, and fails where FlashInfer is not
    # installed or does not import. FlashInfer's sampler takes no request with a seed, and all requests here have one
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    # the default is 1. FlashInfer then compiles at the first sum on all ranks at once, takes memory that no plan
    # counts, and hangs where it fails on one rank alone; it has not run with hybridflow so far.
    # Its sums have no fixed order: in bfloat16 routers of two ranks may then choose other experts for a token
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
