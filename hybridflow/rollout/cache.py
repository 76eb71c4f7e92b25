"""The engine's KV cache: released while the trainer needs the memory, and back before the next generation."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import LLM


class KVCache(Protocol):
    """No request may be running when it is released. What was in it is lost, and it is zero when it is back.

    vLLM multiplies what lies behind a sequence by zero: what was a NaN would stay one.
    """

    def release(self) -> None: ...
    def restore(self) -> None: ...


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
