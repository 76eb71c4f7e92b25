"""A long run holds no more than a short one: tensors, memory, threads, files; measured in one that saves at every step.

Prompts come round every four iterations and every response has the same length, so that iterations 3 and 19 hold
tensors of the same sizes.
"""

import json
import re
from pathlib import Path

import pytest

from hybridflow.cli.checkpoints import main
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

EARLY, LATE = 3, 19
# The main heap grows by 64 MiB at once, which `parallel.platform` asks of glibc, and that once in the first iterations
# or after them; half as much again for heaps of threads. A thread a save, each with a heap of its own, took 250 MiB.
ALLOWED_BYTES = 96 << 20
# vLLM keeps what it sampled its last step by: some tensors of a number a request, now one more, now one fewer
OF_A_STEP = 256
KEYS = (
    f"num_iterations={LATE}",
    "sampling.logit_bias={2: -100}",  # no response ends before its limit
    "reward.normalization=running",
    "checkpoint.save_interval=1",
    "checkpoint.async_save=true",
    "metrics.tensorboard=true",
    "metrics.eval_interval=3",  # and after the last
    "metrics.eval_reward=hybridflow.rewards:exact_match",
)


pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run, and held.RANK."""
    root = tmp_path_factory.mktemp("growth")
    inputs = make_inputs(root / "inputs")
    config, out = write_config(root / "config.yaml", inputs), root / "held"
    heldout = f"data.heldout={inputs / 'heldout.jsonl'}"
    run_ranks(2, "tests.checkpoint.growth_worker", out, f"{EARLY},{LATE}", config, heldout, *KEYS)
    return root


def test_what_a_run_holds_does_not_grow(root: Path) -> None:
    for rank in range(2):
        held = json.loads((root / f"held.{rank}").read_text())
        early, late = held[str(EARLY)], held[str(LATE)]
        for kind in ("threads", "descriptors"):
            assert late[kind] == early[kind], kind
        assert early["tensors"] > 100 and early["tensor bytes"] > 10 << 20, "there is a model"
        for kind in ("tensors", "objects"):
            assert late[kind] - early[kind] < LATE - EARLY, f"{kind}: one an iteration"
        assert abs(late["tensor bytes"] - early["tensor bytes"]) <= OF_A_STEP
        assert late["resident"] - early["resident"] < ALLOWED_BYTES


def test_its_checkpoints_are_listed_and_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hybridflow.checkpoints` on what a training has written: the two newest, of which every byte is read."""
    assert main([str(root / "run"), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [(row[0], row[-1]) for row in rows] == [(str(LATE - 1), "verified"), (str(LATE), "verified, latest")]
    assert all(re.fullmatch(r"-?[0-9.]+", row[3]) for row in rows), "reward/score_mean"
    assert [row[4] != "-" for row in rows] == [True, True], "eval/accuracy"
