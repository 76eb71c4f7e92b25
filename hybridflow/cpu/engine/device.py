"""A vLLM engine on a CPU, as `rollout/device.py` asks for it, and the engine's KV cache there."""

from typing import TYPE_CHECKING, Any, Literal

from hybridflow.cpu import fresh_pages
from hybridflow.cpu.engine.decoding import SeveralSteps
from hybridflow.cpu.engine.delta_net import compute_delta_nets, register_language_models
from hybridflow.cpu.engine.patches import patch, patch_latent_attention
from hybridflow.models.memory import bytes_of, storages, tensors_of

if TYPE_CHECKING:
    from torch import nn
    from vllm import LLM


class CpuKVCache:
    """vLLM's sleep mode does not exist there (0.32.0). The storages shrink to nothing.

    The tensors and every view of them stay; only the memory under them goes and comes.
    """

    def __init__(self, llm: "LLM") -> None:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._storages = storages(tensors_of(runner.kv_caches))
        self._sizes = [storage.nbytes() for storage in self._storages]

    def release(self) -> None:
        """No request may be running. The content is lost."""
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """The content is zero: the engine's prefix cache must be reset before it is used.

        vLLM multiplies what lies behind a sequence by zero: what was a NaN would stay one.
        """
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
            fresh_pages.zero(bytes_of(storage))


class CpuEngine:
    """No graphs and no sleep mode, which vLLM has on GPUs alone; several decoding steps for one of vLLM's scheduler."""

    kind: Literal["cpu"] = "cpu"
    name, backend = "the CPU", "gloo"

    def prepare(self) -> None:
        patch()

    def prepare_states(self, architecture: str) -> None:
        """vLLM's kernels there take bfloat16 alone, and a copy of a weight."""
        compute_delta_nets()
        register_language_models((architecture,))

    def prepare_latent(self) -> None:
        """vLLM turns queries wrongly there, and rounds routers' logits."""
        patch_latent_attention()

    def settings(self, *, eager: bool, sleeps: bool, block_tokens: int) -> dict[str, Any]:
        return {
            "enable_chunked_prefill": False,  # a prompt cut in two takes a seeded draw back: here vLLM cannot
            "enforce_eager": True,
            "enable_sleep_mode": False,
            "block_size": block_tokens,
        }

    def kv_cache(self, llm: "LLM") -> CpuKVCache:
        return CpuKVCache(llm)

    def finish(self, llm: "LLM", *, pp: int) -> None:
        engine: Any = llm.llm_engine
        runner = engine.model_executor.driver_worker.worker.model_runner
        _receive_from_earlier_stage(runner)
        if pp == 1:
            SeveralSteps(engine.engine_core.engine_core.scheduler, runner)

    def notes(self, model: "nn.Module") -> list[str]:
        return []


def _receive_from_earlier_stage(runner: Any) -> None:
    """Room for what a later pipeline stage receives. vLLM 0.32.0 makes it in a profile run, which a CPU skips."""
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
