"""Directories of adapters: said to be that, with the base model and how to merge."""

import json
from pathlib import Path

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.errors import CheckpointError
from tests.messages import like
from tests.peft_models import save_as_run, write_by_hand
from tests.tiny_models import make_checkpoints

LORA = {"base_model_name_or_path": "Qwen/Qwen3-4B", "peft_type": "LORA", "task_type": "CAUSAL_LM"}


def refusal(path: Path, said: str) -> list[str]:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(said)
    (path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        read_spec(path)
    return str(caught.value).splitlines()


def further(path: Path, role: str, base: str, option: str = "") -> list[str]:
    """What to do: a line to train it, a line to merge it."""
    return [
        f"train it further with {role}.model: {base} and {role}.lora.adapter_path: {path}, or merge it first and name "
        "the merged directory:",
        f"    hybridflow convert peft-to-hf {path} DST{option}",
    ]


@pytest.mark.parametrize(("task", "role"), [("CAUSAL_LM", "actor"), ("SEQ_CLS", "critic")])
def test_an_adapter_alone(task: str, role: str, tmp_path: Path) -> None:
    path = tmp_path / "lora"
    first, second = refusal(path, json.dumps(LORA | {"task_type": task}))
    says, command = further(path, role, "Qwen/Qwen3-4B")
    assert first == like(
        f"{path / 'adapter_config.json'}: this directory holds an adapter (peft_type = 'LORA') of "
        f"base_model_name_or_path = 'Qwen/Qwen3-4B' and no whole model; {says}"
    )
    assert second == command


def test_another_kind_of_adapter_is_for_peft_to_merge(tmp_path: Path) -> None:
    path = tmp_path / "ia3"
    first, *lines = refusal(path, json.dumps(LORA | {"peft_type": "IA3", "task_type": "SEQ_CLS"}))
    assert "(peft_type = 'IA3')" in first and "merge it first, copy the tokenizer's files" in first
    assert lines == [
        "    from peft import AutoPeftModelForSequenceClassification",
        f"    AutoPeftModelForSequenceClassification.from_pretrained('{path}').merge_and_unload()"
        f".save_pretrained('{path}-merged')",
    ]


def test_an_adapter_beside_the_config_of_its_base(tmp_path: Path) -> None:
    model = make_checkpoints(tmp_path, family="qwen3", tied=False) / "policy"
    (model / "model.safetensors").unlink()
    assert "merge it first" in refusal(model, json.dumps(LORA))[0]


@pytest.mark.parametrize("said", ["{", "[]"])
def test_an_adapter_whose_config_is_damaged(said: str, tmp_path: Path) -> None:
    first, second = refusal(tmp_path / "lora", said)
    says, command = further(tmp_path / "lora", "actor", "BASE_MODEL", " --base BASE_MODEL")
    assert first.endswith(says) and second == command


def test_a_whole_model_with_an_adapters_config_beside_it(tmp_path: Path) -> None:
    """As tools leave it that merge in place."""
    model = make_checkpoints(tmp_path, family="qwen3", tied=False) / "policy"
    (model / "adapter_config.json").write_text(json.dumps(LORA))
    assert read_spec(model).family == "qwen3"


def test_the_checkpoint_of_a_run_with_adapters(tmp_path: Path) -> None:
    base = make_checkpoints(tmp_path, family="qwen3", tied=False) / "policy"
    modules = {f"model.layers.{layer}.self_attn.o_proj": (64, 64) for layer in range(2)}
    run = save_as_run(write_by_hand(base, tmp_path / "peft", modules), base, tmp_path / "actor")
    with pytest.raises(CheckpointError) as caught:
        read_spec(run)
    first, second = str(caught.value).splitlines()
    assert f"actor.model: {base} and actor.lora.adapter_path: {run}, or merge it first" in first
    assert second == f"    hybridflow convert megatron-to-hf {run} DST"


def test_a_converted_model_beside_an_adapters_config(tmp_path: Path) -> None:
    base = make_checkpoints(tmp_path, family="qwen3", tied=False) / "policy"
    to_megatron(base, tmp_path / "converted")
    (tmp_path / "converted" / "adapter_config.json").write_text(json.dumps(LORA))
    assert read_spec(tmp_path / "converted").family == "qwen3"
