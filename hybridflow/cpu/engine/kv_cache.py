"""The engine's KV cache on a CPU: released while the trainer needs the memory, and back before the next generation."""

from typing import TYPE_CHECKING

from hybridflow.cpu import fresh_pages
from hybridflow.models.memory import bytes_of, storages, tensors_of

if TYPE_CHECKING:  # vLLM is imported when vLLM's settings stand
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
