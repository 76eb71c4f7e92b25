"""Directories of adapters: said to be that, with the base model and how to merge."""

import json
from pathlib import Path

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.errors import CheckpointError
from tests.messages import like
from tests.tiny_models import make_checkpoints

LORA = {"base_model_name_or_path": "Qwen/Qwen3-4B", "peft_type": "LORA", "task_type": "CAUSAL_LM"}


def refusal(path: Path, said: str) -> list[str]:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(said)
    (path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        read_spec(path)
    return str(caught.value).splitlines()


def merging(path: Path, peft_class: str) -> list[str]:
    return [
        f"    from peft import {peft_class}",
        f"    {peft_class}.from_pretrained('{path}').merge_and_unload().save_pretrained('{path}-merged')",
    ]


@pytest.mark.parametrize(
    ("task", "peft_class"),
    [("CAUSAL_LM", "AutoPeftModelForCausalLM"), ("SEQ_CLS", "AutoPeftModelForSequenceClassification")],
)
def test_an_adapter_alone(task: str, peft_class: str, tmp_path: Path) -> None:
    path = tmp_path / "lora"
    first, *lines = refusal(path, json.dumps(LORA | {"task_type": task}))
    assert first == like(
        f"{path / 'adapter_config.json'}: this directory holds an adapter (peft_type = 'LORA') of "
        "base_model_name_or_path = 'Qwen/Qwen3-4B' and no whole model; merge it first"
    )
    assert lines == merging(path, peft_class)


def test_an_adapter_beside_the_config_of_its_base(tmp_path: Path) -> None:
    model = make_checkpoints(tmp_path, family="qwen3", tied=False) / "policy"
    (model / "model.safetensors").unlink()
    assert "merge it first" in refusal(model, json.dumps(LORA))[0]


@pytest.mark.parametrize("said", ["{", "[]"])
def test_an_adapter_whose_config_is_damaged(said: str, tmp_path: Path) -> None:
    assert refusal(tmp_path / "lora", said)[1:] == merging(tmp_path / "lora", "AutoPeftModelForCausalLM")


def test_a_whole_model_with_an_adapters_config_beside_it(tmp_path: Path) -> None:
    """As tools leave it that merge in place."""
    model = make_checkpoints(tmp_path, family="qwen3", tied=False) / "policy"
    (model / "adapter_config.json").write_text(json.dumps(LORA))
    assert read_spec(model).family == "qwen3"
