"""The KV cache of an engine on CUDA, whose allocator is simulated: memory that vLLM maps again has anything in it."""

from types import SimpleNamespace

import torch

from hybridflow.rollout.cache import CudaKVCache


class Allocator:
    """What of a vLLM engine in sleep mode the cache deals with."""

    def __init__(self) -> None:
        self.caches = [torch.ones(2, 3), torch.ones(4)]
        self.calls: list[str] = []
        runner = SimpleNamespace(kv_caches=self.caches)
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.calls.append("wake_up")
        for cache in self.caches:
            cache.fill_(float("nan"))


def test_what_comes_back_is_zero() -> None:
    vllm = Allocator()
    cache = CudaKVCache(vllm)
    cache.release()
    cache.release()
    cache.restore()
    assert [x.unique().tolist() for x in vllm.caches] == [[0], [0]]
    vllm.caches[0][0, 0] = 5
    cache.restore()  # awake already
    assert vllm.caches[0][0, 0] == 5 and vllm.calls == ["sleep 1", "wake_up"]
