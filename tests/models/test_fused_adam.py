"""torch's Adam in one kernel, where there is no other fused one: in a process of its own, as megatron wants a group."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybridflow.architecture.spec import read_spec
from hybridflow.config import OptimizerConfig
from hybridflow.models import optimizer
from hybridflow.models.build import build_model
from hybridflow.models.memory import HostMemory
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout
from tests.tiny_models import make_checkpoints

ROOT = Path(__file__).resolve().parents[2]
CASES = [f"{dtype} {zero1}" for dtype in ("float32", "bfloat16") for zero1 in ("zero1", "whole")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    policy = make_checkpoints(tmp_path_factory.mktemp("fused"), family="qwen2", tied=False) / "policy"
    command = [sys.executable, "-m", "tests.models.test_fused_adam", str(policy)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_the_fused_kernel_takes_the_same_steps(measured: dict, case: str) -> None:
    """Four of them, after the second of which the state went to the host and back, and then the count was set anew."""
    found = measured[case]
    assert found["fused"] == [True] and found["plain"] == [None]
    assert found["moved"] > 1e-3, "the weights have changed"
    assert found["difference"] < 1e-6
    assert found["steps"] == [11, 11]


def measure(model: str) -> dict[str, dict]:
    platforms.start(seed=0)
    results = {case: compare(Path(model), *case.split()) for case in CASES}
    platforms.stop()
    return results


def compare(model: Path, dtype: str, zero1: str) -> dict:
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, zero1=zero1 == "zero1")
    fused, plain = trained(model, dtype, config), trained(model, dtype, config, fuses=False)
    before, after, same = mains(trained(model, dtype, config)), mains(stepped(fused)), mains(stepped(plain))
    return {
        "fused": flags(fused),
        "plain": flags(plain),
        "moved": float((after - before).abs().max()),
        "difference": float((after - same).abs().max()),
        "steps": [fused.num_steps(), plain.num_steps()],
    }


def trained(model: Path, dtype: str, config: OptimizerConfig, *, fuses: bool = True) -> optimizer.TrainedModel:
    spec, grid = read_spec(model), Grid.build(Layout(1, 1, 1, (0,)), ProcessGroups())
    options = dict(sequence_parallel=False, recompute="none", device=torch.device("cpu"))
    chunks = build_model(spec, grid, head="lm", dtype=dtype, **options)
    with contextlib.nullcontext() if fuses else mock.patch.object(optimizer, "fuse_adam", lambda each: None):
        return optimizer.TrainedModel(chunks, grid, config, bucket_bytes=None, overlap=False)


def stepped(model: optimizer.TrainedModel) -> optimizer.TrainedModel:
    generator, model._host = torch.Generator().manual_seed(0), HostMemory(kept=True)
    model.reserve_host_memory()
    blocks = [block.data_ptr() for block in model._host.blocks]
    for number in range(4):
        model.zero_gradients()
        for gradients in model._gradients():
            gradients.copy_(torch.randn(gradients.shape, generator=generator))
        model.step(1e-3)
        if number == 1:
            with model.offloaded(gradients=True, optimizer=True):
                assert model.memory_bytes()["optimizer"] == 0
                assert [block.data_ptr() for block in model._host.blocks] == blocks, "as much as was foreseen"
            model.set_num_steps(9)
    return model


def mains(model: optimizer.TrainedModel) -> torch.Tensor:
    """What the optimizer steps, float32."""
    return torch.cat([s.tensors.get("fp32_param", s.parameter.data).view(-1).clone() for s in model.owned_states()])


def flags(model: optimizer.TrainedModel) -> list:
    groups = [group for part in model.optimizer.chained_optimizers for group in part.optimizer.param_groups]
    return sorted({group.get("fused") for group in groups}, key=str)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
