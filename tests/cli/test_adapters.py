"""A run with adapters on two ranks, and what reads it afterwards: convert, eval, a run that begins with them."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridflow.convert.adapted import to_peft
from hybridflow.convert.to_huggingface import to_huggingface
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import ROOT, of_no_rank
from tests.tools.convert.tiny import assert_same_bytes, left_in

REWARD = "hybridflow.rewards:exact_match"
pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


def hybridflow(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridflow", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=of_no_rank(), capture_output=True, text=True, timeout=600)


def train(root: Path, inputs: Path, name: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    """PPO with adapters of actor and critic, and with the actor without them as the reference."""
    config = write_config(root / f"{name}.yaml", inputs)
    tree = json.loads(config.read_text()) | {"name": name, "reference": None}
    for role in ("actor", "critic"):
        tree[role] |= {"optimizer": {"lr": 0.02}, "lora": {"rank": 4, "exclude_modules": ["k_proj"]}, **changes}
    tree["data"]["heldout"] = str(inputs / "heldout.jsonl")
    config.write_text(json.dumps(tree))
    return hybridflow("train", config, "--nproc", 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    done = train(root, make_inputs(root / "inputs"), "run")
    assert done.returncode == 0, done.stderr
    return root / "run"


def test_the_checkpoint_converts_to_what_the_run_has_written(run: Path, tmp_path: Path) -> None:
    step = run / "checkpoints" / "step_000002"
    to_peft(step / "actor", tmp_path / "adapter")
    assert left_in(tmp_path / "adapter") == ["adapter_config.json", "adapter_model.safetensors", "base_weights.json"]
    for file in left_in(tmp_path / "adapter"):
        assert (tmp_path / "adapter" / file).read_bytes() == (run / "adapter" / file).read_bytes(), file
    to_huggingface(step / "actor", tmp_path / "merged")
    assert_same_bytes(tmp_path / "merged", run / "hf")
    to_huggingface(run / "adapter", tmp_path / "again")
    assert_same_bytes(tmp_path / "again", run / "hf")
    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == json.loads(
        (run / "hf" / "config.json").read_text()
    )
    to_peft(step / "critic", tmp_path / "critic")
    to_huggingface(step / "critic", tmp_path / "merged_critic")
    to_huggingface(tmp_path / "critic", tmp_path / "critic_again")
    assert_same_bytes(tmp_path / "merged_critic", tmp_path / "critic_again")


def test_evaluations_of_the_adapters_and_of_the_merged_model_are_one(run: Path) -> None:
    """The last checkpoint, what the run has written, and the base model, which answers otherwise."""
    answers = {}
    for name, given in {"step_000002": run, "adapter": run / "adapter", "hf": run / "hf"}.items():
        done = hybridflow("eval", given, "--nproc", 2, "--reward", REWARD)
        assert done.returncode == 0, done.stderr
        rows = (run / "eval" / name / "heldout.jsonl").read_text().splitlines()
        answers[name] = [(row["prompt"], row["response"]) for row in map(json.loads, rows)]
    assert len(answers["hf"]) == 5 and answers["step_000002"] == answers["adapter"] == answers["hf"]
    base = run.parent / "inputs" / "policy"
    done = hybridflow("eval", base, run / "config.yaml", "--nproc", 2, "--reward", REWARD, "--output", run / "base")
    assert done.returncode == 0, done.stderr
    rows = (run / "base" / "heldout.jsonl").read_text().splitlines()
    assert [(row["prompt"], row["response"]) for row in map(json.loads, rows)] != answers["hf"]


def test_a_run_begins_with_the_adapters_of_a_checkpoint(run: Path) -> None:
    """As with those of the directory of PEFT: the same first scores, and the reference has the adapters too."""
    first = {}
    for name, directory in (("from_step", "checkpoints/step_000002/actor"), ("from_peft", "adapter")):
        tree = json.loads((run.parent / "run.yaml").read_text()) | {"name": name, "num_iterations": 1}
        tree["actor"]["lora"] = {"adapter_path": str(run / directory)}
        (run.parent / f"{name}.yaml").write_text(json.dumps(tree))
        done = hybridflow("train", run.parent / f"{name}.yaml", "--nproc", 2)
        assert done.returncode == 0, done.stderr
        with (run.parent / name / "metrics.csv").open() as file:
            (row,) = csv.DictReader(file)
        said = [json.loads(line) for line in (run.parent / name / "samples.jsonl").read_text().splitlines()]
        first[name] = [row["actor/loss"], *((sample["prompt"], sample["response"]) for sample in said)]
        assert abs(float(row["kl/reference_mean"])) < 1e-6, "the reference has the same adapters"
    assert first["from_step"] == first["from_peft"] and len(first["from_step"]) > 3


@pytest.mark.parametrize("given", ["adapter", "checkpoints/step_000002/actor"])
def test_adapters_given_as_a_model(given: str, run: Path) -> None:
    done = hybridflow("train", run.parent / "run.yaml", f"actor.model={run / given}", "name=other", "--nproc", 2)
    assert done.returncode == 1 and f"actor.lora.adapter_path: {run / given}, or merge it first" in done.stderr
    assert "Traceback" not in done.stderr
    done = hybridflow("convert", "show", run / given)
    assert done.returncode == 1 and f"{run / given} DST" in done.stderr


def test_a_checkpoint_of_adapters_and_a_run_without(run: Path) -> None:
    """Neither goes on from the other."""
    done = hybridflow(
        *("train", run.parent / "run.yaml", f"checkpoint.load={run}", "name=whole", "actor.lora=null", "--nproc", 2),
        f"reference={{model: {run.parent / 'inputs' / 'policy'}, dtype: float32}}",
    )
    assert done.returncode == 1 and "actor.lora" in done.stderr and "Traceback" not in done.stderr, done.stderr
