"""hf_overrides: a run equals one whose config.json says the same, and HuggingFace, beyond the original positions."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridflow.architecture.peft_directory import recorded_overrides
from hybridflow.convert.adapted import to_peft
from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.formats.safetensors_files import SafetensorsDirectory
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

POSITIONS, LONGEST = 16, 64  # of the file, of the run
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS}
PROMPTS = ["1+2+3+4+5+6+7+8+9+0+1+2+3+4+5=", "9*8*7*6*5*4*3*2*1*0*9*8=", "12+34+56+78+90+12+34=", "0-1-2-3-4-5-6-7-8="]
FAMILIES = ("qwen3_moe", "gemma3")  # gemma3: layers with windows turn by angles of their own
NUM_LAYERS = 2
LORA = {"rank": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("overrides")
    (root / "train.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    configs = []
    for family in FAMILIES:
        original = make_checkpoints(root / family, family=family, tied=False, head_dim=32, max_length=POSITIONS)
        shutil.copytree(original / "policy", changed := root / family / "changed")
        change(changed / "config.json", family)
        overrides = {"hf_overrides": {"max_position_embeddings": LONGEST, "rope_scaling": YARN}}
        configs.append(write_config(root, f"{family}_key", original / "policy", overrides))
        configs.append(write_config(root, f"{family}_file", changed, {}))
    lora = overrides | {"lora": LORA}
    configs.append(write_config(root, "lora_key", root / FAMILIES[0] / "policy", lora))
    run_ranks(1, "tests.distributed.overrides_worker", root, *configs)
    return root


def change(file: Path, family: str) -> None:
    """As a user would write it by hand."""
    tree = json.loads(file.read_text())
    rope = tree["rope_parameters"]
    rope = rope["full_attention"] if family == "gemma3" else rope
    rope.update(YARN)
    file.write_text(json.dumps(tree | {"max_position_embeddings": LONGEST}))


def write_config(root: Path, name: str, model: Path, more: dict[str, Any]) -> Path:
    actor = {"model": str(model), "dtype": "float32", "optimizer": {"lr": 1e-3}}
    path = root / f"{name}.yaml"
    tree = {
        "name": name,
        "output_dir": str(root),
        "num_iterations": 1,
        "data": {"train": str(root / "train.jsonl"), "prompts_per_iteration": 4, "max_prompt_length": 40},
        "sampling": {"max_response_length": 8, "samples_per_prompt": 2},
        "actor": actor | more,
        "reference": None if "lora" in more else {"model": str(model), "dtype": "float32"},
        "reward": {"functions": [{"function": "tests.distributed.reward_functions:length"}]},
        "rollout": {"kv_cache_gib": 0.0625},
        "algorithm": {"name": "grpo", "kl": {"use": "loss", "coef": 0.1, "estimator": "k3"}},
        "checkpoint": {"save_interval": 1},
        "metrics": {"tensorboard": False},
    }
    path.write_text(json.dumps(tree))
    return path


def found(root: Path, name: str) -> dict[str, Any]:
    return torch.load(root / f"{name}.pt", weights_only=False)


def rows(run: dict[str, Any], name: str) -> list[torch.Tensor]:
    """Of each sequence."""
    return list(run[name].split(run["lengths"].tolist()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_key_equals_the_file(root: Path, family: str) -> None:
    """Tokens, log-probs and the weights after a step to the bit; rows reach beyond the original positions."""
    key, file = found(root, f"{family}_key"), found(root, f"{family}_file")
    assert key["lengths"].max() > 2 * POSITIONS
    assert key["spec"].max_positions == LONGEST
    for name in ("rope", "window_rope"):
        assert getattr(key["spec"], name) == getattr(file["spec"], name)
    for name in ("input_ids", "lengths", "actor", "reference"):
        assert torch.equal(key[name], file[name]), name
    assert torch.equal(key["reference"], key["actor"]), "the reference is the actor's model, and has its overrides"
    ours, theirs = (SafetensorsDirectory(root / f"{family}_{kind}" / "hf") for kind in ("key", "file"))
    for name, info in ours.tensors.items():
        assert torch.equal(ours.read(name, info.shape), theirs.read(name, info.shape)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_greedy_tokens_are_huggingfaces(root: Path, family: str) -> None:
    run = found(root, f"{family}_key")
    changed, original = (
        AutoModelForCausalLM.from_pretrained(root / family / name, dtype=torch.float32).eval()
        for name in ("changed", "policy")
    )
    of_rows = zip(rows(run, "input_ids"), run["prompt_lengths"].tolist(), rows(run, "actor"), strict=True)
    others = []
    for tokens, prompt, log_probs in of_rows:
        expected, other = (log_probs_of(model, tokens)[prompt - 1 :] for model in (changed, original))
        assert expected.argmax(-1).tolist() == tokens[prompt:].tolist()
        others += (other.argmax(-1) != tokens[prompt:]).tolist()
        expected = expected.gather(1, tokens[prompt:, None])[:, 0]
        torch.testing.assert_close(log_probs[prompt:], expected, atol=1e-4, rtol=0)
    assert any(others), "the original config.json gives other tokens"


def log_probs_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_exports_and_checkpoints_hold_the_changes(root: Path, family: str, tmp_path: Path) -> None:
    expected = json.loads((root / f"{family}_file" / "hf" / "config.json").read_text())
    assert json.loads((root / f"{family}_key" / "hf" / "config.json").read_text()) == expected
    actor = root / f"{family}_key" / "checkpoints" / "step_000001" / "actor"
    assert json.loads((actor / "config.json").read_text()) == expected
    to_huggingface(actor, tmp_path / "converted")
    assert json.loads((tmp_path / "converted" / "config.json").read_text()) == expected


def test_adapters_that_are_merged_hold_them_too(root: Path, tmp_path: Path) -> None:
    """Their base model lies in a directory with the original config.json."""
    expected = json.loads((root / "qwen3_moe_file" / "hf" / "config.json").read_text())
    assert json.loads((root / "lora_key" / "hf" / "config.json").read_text()) == expected
    actor, adapter = root / "lora_key" / "checkpoints" / "step_000001" / "actor", root / "lora_key" / "adapter"
    to_peft(actor, tmp_path / "extracted")
    for source in (actor, adapter, tmp_path / "extracted"):
        to_huggingface(source, tmp_path / "converted", overwrite=True)
        assert json.loads((tmp_path / "converted" / "config.json").read_text()) == expected
        assert recorded_overrides(source) == {"max_position_embeddings": LONGEST, "rope_scaling": YARN}
