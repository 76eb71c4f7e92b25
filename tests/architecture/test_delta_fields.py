"""What config.json says of gated delta nets: what is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.architecture.layer_kinds import DeltaSizes
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.errors import CheckpointError

SHAPES = Path(__file__).resolve().parents[2] / "configs" / "shapes"
FULL, LINEAR = "full_attention", "linear_attention"


def read(directory: Path, **changes: Any) -> ModelSpec:
    tree = json.loads((SHAPES / "qwen3.5-9b" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(with_text(tree, changes)))
    return read_spec(directory)


def with_text(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return tree | {"text_config": tree["text_config"] | changes} if "text_config" in tree else tree | changes


def test_every_fourth_layer_has_attention() -> None:
    spec = read_spec(SHAPES / "qwen3.5-9b")
    assert spec.mixers == (*["delta_net"] * 3, "attention") * 8
    assert spec.delta == DeltaSizes(16, 32, 128, 128, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [LINEAR] * 31}, "layer_types = '...' is not supported: has 31 entries for 32 layers"),
        ({"layer_types": [*[LINEAR] * 31, "mamba"]}, "layer_types.31 = 'mamba' is not supported: must be full"),
        ({"layer_types": [[LINEAR]] * 32}, "layer_types.0 = .* is not supported: must be full"),
        ({"layer_types": LINEAR}, "layer_types = 'linear_attention' is not supported: must be a list"),
        ({"layer_types": [FULL] * 32}, "some of the layers must be linear_attention"),
        ({"layer_types": [LINEAR] * 32}, "some of the layers must be full_attention"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads = 0 is not supported"),
        ({"linear_num_value_heads": 33}, "linear_num_value_heads = 33 is not supported: must be a multiple of"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1 is not supported: must be at least 2"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize("name", ["Llama4ForCausalLM", "NemotronHForCausalLM", "GptOssForCausalLM"])
def test_near_architectures_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(CheckpointError, match=f"{name}' is not supported: [a-z].* (is|are) not supported"):
        read_spec(tmp_path)
