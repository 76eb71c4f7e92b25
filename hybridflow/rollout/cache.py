"""The engine's KV cache: released while the trainer needs the memory, and back before the next generation; its use."""

from typing import TYPE_CHECKING, Any, Protocol

from hybridflow.models.memory import tensors_of

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import LLM


class CacheUse:
    """How full the scheduler's KV cache was, and how many requests lost their blocks to others, since the last `pop`.

    vLLM 0.32.0 counts both for its own log alone, and with the log come counters of every request. Here the scheduler's
    methods are wrapped: the cache is fullest when a step has its blocks and has not run yet.
    """

    def __init__(self, llm: "LLM") -> None:
        core: Any = llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        self._most, self._preemptions = 0.0, 0
        schedule, preempt, pool = scheduler.schedule, scheduler._preempt_request, scheduler.kv_cache_manager.block_pool

        def scheduled(*args: Any, **named: Any) -> Any:
            found = schedule(*args, **named)
            self._most = max(self._most, pool.get_usage())
            return found

        def preempted(*args: Any, **named: Any) -> Any:
            self._preemptions += 1
            return preempt(*args, **named)

        vars(scheduler).update(schedule=scheduled, _preempt_request=preempted)

    def pop(self) -> tuple[float, int]:
        """(largest share of the blocks, preemptions)."""
        found = self._most, self._preemptions
        self._most, self._preemptions = 0.0, 0
        return found


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
            caches = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches
            for cache in tensors_of(caches):
                cache.zero_()
            self._released = False
