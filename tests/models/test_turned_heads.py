"""A model whose queries and keys are turned where the projection has written them, beside one that turns copies; in a
process of its own, as megatron wants a group."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybridflow.architecture.spec import read_spec
from hybridflow.cpu.layers import TurnedHeads, TurningHeads
from hybridflow.parallel import platform as platforms
from tests.cpu.megatron.test_weight_gradients import gradients
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

MICRO_BATCHES = 2
FORWARD_PASSES = {"none": 1, "selective": 1, "full": 2}  # of a projection: attention alone is made again, or all


@pytest.mark.compiles
@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(("family", "turned"), [("qwen2", True), ("qwen3", False)])  # whose heads have norms
@pytest.mark.distributed
def test_gradients_are_the_same(family: str, turned: bool, tmp_path: Path) -> None:
    policy = make_checkpoints(tmp_path, family=family, tied=False) / "policy"
    done = run_ranks(1, "tests.models.test_turned_heads", policy)
    found = json.loads(done.stdout.splitlines()[-1])
    for recompute, passes in FORWARD_PASSES.items():
        of = found[recompute]
        assert of["calls"] == turned * passes * MICRO_BATCHES * found["layers"]
        assert of["largest"] > 1e-2
        assert of["difference"] < 1e-6 * of["largest"]


def measure(model: Path) -> dict:
    platforms.start(seed=0)
    with mock.patch.object(TurningHeads, "_turns", lambda *args: False):
        copies = gradients(model, [])
    found: dict = {"layers": read_spec(model).num_layers}
    for recompute in FORWARD_PASSES:
        with mock.patch.object(TurnedHeads, "apply", mock.Mock(wraps=TurnedHeads.apply)) as turns:
            in_place = gradients(model, [], recompute)
        found[recompute] = {
            "calls": turns.call_count,
            "largest": float(copies.abs().max()),
            "difference": float((in_place - copies).abs().max()),
        }
    platforms.stop()
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(measure(Path(sys.argv[1]))))
