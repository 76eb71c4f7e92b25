"""Steps of an optimizer whose state lies in host memory, beside one that holds the state: bits, seconds, memory.

python -m tests.gpu.staged_worker MODEL OUT
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.config import OptimizerConfig
from hybridflow.models.build import build_model
from hybridflow.models.optimizer import TrainedModel
from hybridflow.parallel import host_memory
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.device import current_device, uses_cuda, wait_for
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.lanes import Lane
from hybridflow.parallel.layout import Layout
from hybridflow.parallel.platform import new_lanes

STEPS = 4


def main(model: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    if not uses_cuda():
        host_memory.PART_BYTES = 1 << 16
    spec, grid = read_spec(model), Grid.build(Layout(1, 1, 1, (0,)), ProcessGroups())
    whole = made(spec, grid, platform.device, staged=False)
    found: dict[str, Any] = {"whole": stepped(whole)}
    before = allocated()
    staged = made(spec, grid, platform.device, staged=True)
    sizes = staged.memory_bytes()
    found |= {
        "kept": allocated() - before - sizes["weights"] - sizes["gradients"],
        "host": staged.host_bytes(),
        "part": staged._staged._size,
    }
    found |= {"staged": stepped(staged), "state": whole.memory_bytes()["optimizer"]}
    found |= {"same": same(whole, staged), "copies": copies(staged)}
    out.write_text(json.dumps(found))
    platforms.stop()


def made(spec: ModelSpec, grid: Grid, device: torch.device, *, staged: bool) -> TrainedModel:
    chunks = build_model(
        spec, grid, head="lm", dtype="bfloat16", sequence_parallel=False, recompute="none", device=device
    )
    generator = torch.Generator(device).manual_seed(0)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.normal_(std=0.02, generator=generator)
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1)
    return TrainedModel(chunks, grid, config, bucket_bytes=None, overlap=False, staged=staged)


def stepped(model: TrainedModel) -> dict[str, Any]:
    """Norms, seconds of a step, and the most memory of the device that a step takes beyond what was there."""
    generator, norms, seconds, most = torch.Generator(current_device()).manual_seed(1), [], [], 0
    for number in range(STEPS):
        model.zero_gradients()
        for gradients in model._gradients():
            gradients.normal_(generator=generator)
        before = allocated()
        if uses_cuda():
            torch.cuda.reset_peak_memory_stats()
        seconds.append(timed(lambda: norms.append(model.step(1e-3))))
        if number and uses_cuda():  # the first makes the moments of a whole state
            most = max(most, torch.cuda.max_memory_allocated() - before)
    return {"norms": norms, "seconds": median(seconds[1:]), "most": most}


def same(whole: TrainedModel, staged: TrainedModel) -> bool:
    weights = zip(whole._weights(), staged._weights(), strict=True)
    ours = [parameter for chunk in staged.chunks for parameter in chunk.parameters()]
    theirs = [parameter for chunk in whole.chunks for parameter in chunk.parameters()]
    states = {id(state.parameter): state.tensors for state in whole.owned_states()}
    held = {id(own): states[id(other)] for own, other in zip(ours, theirs, strict=True)}
    return all(torch.equal(*pair) for pair in weights) and all(
        torch.equal(tensor.to(current_device()), held[id(state.parameter)][name][state.start : state.stop])
        for state in staged.owned_states()
        for name, tensor in state.tensors.items()
    )


def copies(model: TrainedModel) -> dict[str, float]:
    """Seconds of all parts in, of all parts out, and of both at once."""
    lanes, blocks = new_lanes(), model._staged.blocks
    slots = [torch.empty_like(blocks[0], device=current_device()) for _ in range(2)]
    work: dict[Lane, Callable[[], None]] = {
        "in": lambda: [slots[0].copy_(block, non_blocking=True) for block in blocks],
        "out": lambda: [block.copy_(slots[1], non_blocking=True) for block in blocks],
    }

    def run(*names: Lane) -> Callable[[], None]:
        return lambda: [lanes.run(name, work[name]) for name in names]

    return {"in": timed(run("in")), "out": timed(run("out")), "both": timed(run("in", "out"))}


def timed(work: Callable[[], Any]) -> float:
    wait_for(current_device())
    started = time.perf_counter()
    work()
    wait_for(current_device())
    return time.perf_counter() - started


def allocated() -> int:
    return torch.cuda.memory_allocated() if uses_cuda() else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
