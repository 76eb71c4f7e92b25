"""Published Qwen3.5: the language model out of a directory with what reads images, there and back, by other names."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weights import num_parameters
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.convert.survey import open_survey
from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.errors import CheckpointError
from hybridflow.placement.placed import left_out
from tests.tiny_models import VOCAB_SIZE, make_wrapper

IN_WRAPPER = "model.language_model."
kinds = pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])


def text_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The language model's, by their names in a directory of the language model alone."""
    tensors = load_file(directory / "model.safetensors")
    kept = {name for name in tensors if name.startswith(IN_WRAPPER) or name == "lm_head.weight"}
    return {name.replace(IN_WRAPPER, "model."): tensors[name] for name in kept}


@kinds
@pytest.mark.parametrize("tied", [False, True])
def test_the_language_model_comes_back_bitwise(experts: bool, tied: bool, tmp_path: Path) -> None:
    source = make_wrapper(tmp_path / "source", experts=experts, tied=tied)
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    expected, found = text_tensors(source), load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    prefix = "Qwen3_5Moe" if experts else "Qwen3_5"
    assert described["architectures"] == [f"{prefix}ForCausalLM"] and "vision_config" not in described
    assert described["mtp_num_hidden_layers"] == 0 and described["tie_word_embeddings"] == tied
    whole = getattr(transformers, f"{prefix}ForConditionalGeneration").from_pretrained(source)
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = torch.randint(4, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(alone(ids).logits, whole(input_ids=ids).logits, rtol=0, atol=1e-4)
    assert num_parameters(read_spec(source), "lm") == alone.num_parameters()


@kinds
def test_experts_in_one_tensor_as_published(experts: bool, tmp_path: Path) -> None:
    """One tensor for the experts of a layer, which save_pretrained takes apart."""
    source = make_wrapper(tmp_path / "source", experts=True)
    expected, spec = open_survey(source), read_spec(source)
    expected.check()
    tensors = load_file(source / "model.safetensors")
    for layer in range(spec.num_layers):
        at = f"{IN_WRAPPER}layers.{layer}.mlp.experts."
        of = [
            [tensors.pop(f"{at}{i}.{x}_proj.weight") for x in ("gate", "up", "down")] for i in range(spec.num_experts)
        ]
        tensors[at + "gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in of])
        tensors[at + "down_proj"] = torch.stack([down for _, _, down in of])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    found = open_survey(source)
    found.check()
    assert found.weights.keys() == expected.weights.keys()
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    shape = found.weights[name].shape
    assert torch.equal(found.files.read(name, shape), of[3][1]), "of the last layer"


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    source = make_wrapper(tmp_path / "source")
    lines = open_survey(source).dropped_lines()
    assert any(line.startswith("model.visual.*") and "reads images" in line for line in lines)
    assert any(line.startswith("mtp.*") and "mtp_num_hidden_layers" in line for line in lines)
    assert len(lines) == 2, "one line each"
    config = FixedDataConfig.model_validate(
        {
            "name": "sft",
            "num_iterations": 1,
            "algorithm": {"name": "sft"},
            "data": {"train": "given", "batch_size": 4, "max_length": 16},
            "actor": {"model": str(source), "optimizer": {"lr": 1e-3}},
        }
    )
    first, second = left_out(config)
    assert first.startswith("actor.model: what reads images is left out")
    assert "mtp_num_hidden_layers" in second


def test_a_wrapper_without_a_language_model_is_refused(tmp_path: Path) -> None:
    source = make_wrapper(tmp_path / "source")
    described = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(described | {"text_config": None}))
    with pytest.raises(CheckpointError, match="text_config = None is not supported: must be an object"):
        read_spec(source)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not supported"),
        ({"layer_types": ["linear_attention"]}, "layer_types = .* has 1 entries for 2 layers"),
        (
            {"layer_types": ["linear_attention", "mamba"]},
            "layer_types.1 = 'mamba' .* must be full_attention or linear_attention",
        ),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads = 6 .* a multiple of linear_num_key_heads = 4"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0"),
    ],
)
def test_what_a_language_model_may_not_say(changes: dict, rule: str, tmp_path: Path) -> None:
    source = make_wrapper(tmp_path / "source")
    described = json.loads((source / "config.json").read_text())
    described["text_config"] |= changes
    (source / "config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=rule):
        read_spec(source)
