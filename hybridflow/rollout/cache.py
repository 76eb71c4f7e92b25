"""The engine's KV cache: released while the trainer needs the memory, and back before the next generation."""

from typing import TYPE_CHECKING

from torch import Tensor, UntypedStorage

from hybridflow.models.memory import refill_with_zeros

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import LLM


class KVCache:
    """Of an engine on a CPU, where vLLM's sleep mode does not exist (0.32.0): the storages shrink to nothing.

    The tensors and every view of them stay; only the memory under them goes and comes.
    """

    def __init__(self, llm: "LLM") -> None:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._storages = _storages(runner.kv_caches)
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
            refill_with_zeros(storage, size)


class CudaKVCache:
    """Of an engine on CUDA, built with enable_sleep_mode: vLLM unmaps the memory and keeps the addresses.

    CUDA graphs hold addresses, so storages cannot be resized there. Our weights are no part of vLLM's memory pool,
    having been allocated elsewhere; what little of the model lies in it (rotary tables) is kept on the host meanwhile
    and comes back too.
    """

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._released = False

    def release(self) -> None:
        """No request may be running. The content is lost."""
        if not self._released:
            self._llm.sleep(level=1)
            self._released = True

    def restore(self) -> None:
        """The content is zero, as on a CPU and for the same reason; vLLM 0.32.0 sees to it on ROCm alone."""
        if self._released:
            self._llm.wake_up()  # all tags: the rotary tables lie under "weights"
            for cache in self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches:
                cache.zero_()
            self._released = False


def _storages(tensors: list[Tensor]) -> list[UntypedStorage]:
    """Each once: the layers' caches are views of one storage or of several, as vLLM likes."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return list({storage.data_ptr(): storage for storage in storages}.values())
