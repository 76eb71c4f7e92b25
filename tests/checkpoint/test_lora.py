"""Whole runs with adapters: what their checkpoints hold, how they go on, and what they leave for others to read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybridflow.architecture.peft_directory import is_other_base
from hybridflow.checkpoint.store import step_name, steps
from hybridflow.formats.distributed_directory import DistributedDirectory
from tests.checkpoint.kills import rows
from tests.checkpoint.test_resume import PLACE_DEPENDENT
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

NUM_ITERATIONS = 5
SETTINGS = [
    *(f"num_iterations={NUM_ITERATIONS}", "checkpoint.save_interval=1", "checkpoint.keep_last=9"),
    *("actor.lora={rank: 4, alpha: 16}", "critic.lora={rank: 2}", "reference=null"),
    *("algorithm.kl.controller=adaptive", "algorithm.kl.reset_reference_interval=2"),
]
DTYPE = torch.float32


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    write_config(root / "config.yaml", make_inputs(root / "inputs"))
    train(root, "undisturbed")
    return root


def train(root: Path, name: str, *overrides: str, ranks: int = 2, status: int = 0) -> str:
    command = (root / "config.yaml", *SETTINGS, f"name={name}", *overrides)
    done = run_ranks(ranks, "hybridflow.train", *command, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == (status != 0), said
    return said


def copied(root: Path, name: str, *, up_to: int) -> None:
    shutil.copytree(root / "undisturbed", root / name)
    for iteration in steps(root / name / "checkpoints"):
        if iteration > up_to:
            shutil.rmtree(root / name / "checkpoints" / step_name(iteration))


def saved(root: Path, role: str) -> set[str]:
    return set(DistributedDirectory(root / "undisturbed" / "checkpoints" / step_name(NUM_ITERATIONS) / role).tensors)


def test_a_checkpoint_holds_what_is_trained_alone(root: Path) -> None:
    linear = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    adapters = {f"decoder.layers.{name}.lora_{x}" for name in linear for x in "ab"}
    moments = {f"optimizer.state.{moment}.{name}" for name in adapters for moment in ("exp_avg", "exp_avg_sq")}
    assert saved(root, "actor") == {*adapters, *moments, "optimizer.num_steps"}
    assert saved(root, "reference") == adapters, "the adapters that it had when it was last reset"
    head = {"output_layer.weight", *(f"optimizer.state.{x}.output_layer.weight" for x in ("exp_avg", "exp_avg_sq"))}
    assert saved(root, "critic") == {*adapters, *moments, *head, "optimizer.num_steps"}


ONE, THOROUGH = ("actor.tensor_parallel_size=1",), pytest.mark.thorough
STAGES = (*ONE, "actor.pipeline_parallel_size=2", "critic.tensor_parallel_size=2")
SEQUENCE = ("actor.sequence_parallel=true", "actor.recompute=full", "rollout.tensor_parallel_size=1")


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        ("one_rank", ONE, 1),
        pytest.param("pp2", STAGES, 2, marks=THOROUGH),
        pytest.param("tp2sp", SEQUENCE, 2, marks=THOROUGH),
    ],
)
def test_a_run_goes_on_in_any_layout(name: str, layout: tuple[str, ...], ranks: int, root: Path) -> None:
    copied(root, name, up_to=2)
    train(root, name, *layout, ranks=ranks)
    found, expected = rows(root / name, first=3), rows(root / "undisturbed", first=3)
    assert len(found) == NUM_ITERATIONS - 2
    for row, same in zip(found, expected, strict=True):
        for metric in row:
            if row[metric] != same[metric] and not metric.startswith(PLACE_DEPENDENT):
                assert float(row[metric]) == pytest.approx(float(same[metric]), rel=1e-4, abs=1e-4), metric


def test_a_checkpoint_does_not_go_on_beside_other_weights(root: Path) -> None:
    copied(root, "other_base", up_to=2)
    shutil.copytree(root / "inputs" / "policy", root / "other")
    tensors = load_file(root / "other" / "model.safetensors")
    name = next(iter(sorted(tensors)))
    save_file(tensors | {name: tensors[name] + 1e-3}, root / "other" / "model.safetensors", metadata={"format": "pt"})
    said = train(root, "other_base", f"actor.model={root / 'other'}", status=1)
    assert "the weights of actor.model" in said and "adapters" in said


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[4, 9, 14, 7, 11, 18, 5]])).logits


def test_peft_reads_the_adapter_and_it_is_what_was_merged(root: Path) -> None:
    run, base = root / "undisturbed", root / "inputs" / "policy"
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPE)
    expected = logits(plain)
    adapted = PeftModel.from_pretrained(plain, run / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=DTYPE)
    assert torch.allclose(logits(merged), logits(adapted), atol=5e-5)
    assert (logits(merged) - expected).abs().max() > 1e-3, "training has changed something"
    assert not is_other_base(run / "adapter", base) and is_other_base(run / "adapter", root / "inputs" / "reference")
    assert json.loads((run / "adapter" / "rendering.json").read_text()) == {"rows": "texts"}
    said = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (4, 16, str(base))


def test_a_run_begins_with_an_adapter_which_its_reference_keeps(root: Path) -> None:
    """With the adapters of another run, and a learning rate of 0: no KL, where the base without them is far away."""
    adapter = root / "undisturbed" / "adapter"
    still = ("actor.optimizer.lr=0", "critic.optimizer.lr=0", "num_iterations=1", "critic.lora=null")
    own = f"actor.lora={{adapter_path: {adapter}}}"
    train(root, "begun", own, *still, "algorithm.kl.reset_reference_interval=null")
    [row] = rows(root / "begun")
    assert abs(float(row["kl/reference_mean"])) < 1e-6
    first, again = (load_file(root / run / "adapter" / "adapter_model.safetensors") for run in ("undisturbed", "begun"))
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
    base = f"reference={{model: {root / 'inputs' / 'policy'}, dtype: float32}}"
    train(root, "far", own, base, *still, "algorithm.kl.reset_reference_interval=null")
    [row] = rows(root / "far")
    assert abs(float(row["kl/reference_mean"])) > 1e-4
