"""A GRPO run whose engine steps, sleeps and updates are timed; or vLLM alone with requests like that run's.

python -m tests.gpu.speed_worker run CONFIG OUT
python -m tests.gpu.speed_worker plain CONFIG OUT

On one GPU also the share of time without a kernel, by torch's profiler. The iterations: one to warm up, one that is
timed, and there one that is profiled.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hybridflow.config import ExperimentConfig
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.device import uses_cuda
from hybridflow.rollout.device import set_environment
from hybridflow.trainers.online import OnlineTrainer

CYCLES = 5
TIMED, PROFILED = 2, 3  # iterations


def run(config: Path) -> dict[str, Any]:
    trainer = OnlineTrainer.from_yaml(str(config))
    trainer.writes_model = False
    steps = Steps(trainer.generator.engine.step)
    trainer.generator.engine.step = steps
    iterate, found = trainer.iterate, {}

    def watched(iteration: int, *rest: Any) -> Any:
        steps.begin()
        if iteration != PROFILED or not uses_cuda() or trainer.platform.world_size > 1:
            done = iterate(iteration, *rest)
        else:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                done = iterate(iteration, *rest)
            found["idle"] = idle_share(kernels_between(profiler, steps))
        if iteration == 1:
            found["tokens"] = done.batch.input_ids[done.batch.response_mask].tolist()
        if iteration == TIMED:
            found["step ms"], found["metrics"] = steps.milliseconds(), done.metrics
        return done

    trainer.iterate = watched
    trainer.fit()
    metrics = {
        name: float(x)
        for name, x in found.pop("metrics").items()
        if name.startswith(("speed/", "time/", "roll", "memory/", "kl/", "reshard/"))
    }
    found |= {"metrics": metrics, "rows a step": trainer.generator.engine.most_rows, **sleeps(trainer)}
    platforms.stop()
    return found


class Steps:
    """The engine's `step`, with the times at which each began and ended."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.times: list[float] = []

    def begin(self) -> None:
        self.times = []

    def __call__(self) -> Any:
        found = self._step()
        self.times.append(time.perf_counter())
        return found

    def milliseconds(self) -> float:
        """Of a step, without the first, which reads the prompts."""
        return 1e3 * (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


def sleeps(trainer: OnlineTrainer) -> dict[str, float]:
    """Milliseconds of a wake and of a sleep, and the bytes of the device that so many of them have cost."""
    engine, platform, seconds = trainer.generator.engine, trainer.platform, {"wake ms": 0.0, "sleep ms": 0.0}

    def timed(name: str, work: Callable[[], None]) -> None:
        platform.synchronize()
        started = time.perf_counter()
        work()
        platform.synchronize()
        seconds[name] += 1e3 * (time.perf_counter() - started) / CYCLES

    with trainer.generator.resharded():
        before = torch.cuda.mem_get_info()[0] if uses_cuda() else 0
        for _ in range(CYCLES):
            timed("wake ms", engine.wake_up)
            timed("sleep ms", engine.sleep)
        lost = before - torch.cuda.mem_get_info()[0] if uses_cuda() else 0
    return seconds | {"lost bytes": lost}


def kernels_between(profiler: Any, steps: Steps) -> list[tuple[int, int]]:
    """(begin, end) in nanoseconds of all that ran on the GPU in the middle half of the steps."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA]
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.duration_ns())
    per_step, half = steps.milliseconds() * 1e6, len(steps.times) // 4
    first = spans[0][0] + per_step * half  # generation comes first in an iteration
    return [span for span in spans if first <= span[0] <= first + 2 * half * per_step]


def idle_share(spans: Iterable[tuple[int, int]]) -> float:
    """Of the time from the first to the last in which none ran."""
    busy, end, first = 0, 0, None
    for begin, stop in spans:
        first = begin if first is None else first
        busy += max(0, stop - max(begin, end))
        end = max(end, stop)
    return 1.0 - busy / max(1, end - (first or 0))


def plain(config: Path) -> dict[str, Any]:
    """vLLM's steps with as many requests as a rollout has: without log-probs and seeds, and as hybridflow asks."""
    platforms.prepare_imports("auto" if uses_cuda() else "cpu")
    set_environment()
    import vllm

    given = ExperimentConfig.from_yaml(config)
    prompt, response = given.data.max_prompt_length, given.sampling.max_response_length
    rows = given.rows_of_replica()
    llm = vllm.LLM(
        model=given.actor.model,
        dtype=given.actor.dtype,
        max_model_len=prompt + response,
        max_num_seqs=given.rollout.sequences_of_step(rows, cuda=uses_cuda()),
        kv_cache_memory_bytes=(8 << 30) if uses_cuda() else 64 << 20,
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=not uses_cuda(),
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=False,
        **({"gpu_memory_utilization": 0.5} if uses_cuda() else {}),
    )
    common = dict(max_tokens=response, ignore_eos=True, detokenize=False, output_kind=2)  # FINAL_ONLY
    asked = {"plain": {}, "as asked": {"logprobs": 0, "flat_logprobs": True}}
    found = {}
    for name, more in asked.items():
        for _ in range(2):  # the first warms up
            llm.reset_prefix_cache()
            for row in range(rows):
                seed = {"seed": row} if more else {}
                params = vllm.SamplingParams(**common, **more, **seed)
                ids = [4 + (row // 8 + i) % 10 for i in range(prompt)]
                llm.llm_engine.add_request(f"{name}-{row}", {"prompt_token_ids": ids}, params)
            steps = Steps(llm.llm_engine.step)
            while llm.llm_engine.has_unfinished_requests():
                steps()
        found[f"{name} ms"] = steps.milliseconds()
    return found


if __name__ == "__main__":
    kind, config, out = sys.argv[1], *map(Path, sys.argv[2:])
    found = {"run": run, "plain": plain}[kind](config)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))
