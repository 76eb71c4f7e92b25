"""Weights in fp8 with a scale a block: read as bfloat16, whole and in parts, converted, and refused where damaged."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from hybridflow.architecture.spec import config_changes, read_spec
from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.convert.verify import verify
from hybridflow.errors import CheckpointError
from hybridflow.formats.block_fp8 import READ_AS_BFLOAT16, BlockFp8Directory
from tests.fp8_models import quantise, quantised
from tests.tiny_models import make_checkpoints


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoints(tmp_path / "made", family="deepseek_v3", tied=False) / "policy"


@pytest.mark.parametrize("rows", [slice(None), slice(0, 128), slice(100, 300), slice(257, 258)])
@pytest.mark.parametrize("columns", [slice(None), slice(128, 200), slice(5, 140)])
def test_any_part_is_that_of_the_whole(rows: slice, columns: slice, tmp_path: Path) -> None:
    narrow, scales, meant = quantised(torch.randn(300, 200, generator=torch.Generator().manual_seed(0)))
    save_file({"w": narrow, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    files = BlockFp8Directory(tmp_path)
    assert list(files.tensors) == ["w"] and files.tensors["w"] == ((300, 200), torch.bfloat16)
    assert torch.equal(files.read("w", (300, 200), rows, columns), meant[rows, columns])
    with pytest.raises(CheckpointError, match=r"w has shape \(300, 200\), config.json asks for \(200, 300\)"):
        files.read("w", (200, 300))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_scale_inv": None}, "w is fp8, and no tensor w_scale_inv is there"),
        ({"w_scale_inv": torch.ones(2, 2)}, r"must be float32 of shape \(3, 2\)"),
        ({"w_scale_inv": torch.ones(3, 2).bfloat16()}, "w_scale_inv is torch.bfloat16"),
    ],
)
def test_scales_that_are_not_as_they_must_be(changes: dict, message: str, tmp_path: Path) -> None:
    narrow, scales, _ = quantised(torch.randn(300, 200))
    tensors = {"w": narrow, "w_scale_inv": scales} | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        BlockFp8Directory(tmp_path)


def test_a_model_is_converted_and_comes_back_as_bfloat16(model: Path, tmp_path: Path) -> None:
    expected, console = quantise(model), Console(file=io.StringIO(), width=200)
    to_megatron(model, tmp_path / "megatron", console=console)
    assert f"{READ_AS_BFLOAT16}\n" in console.file.getvalue()
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert verify(model, tmp_path / "megatron") == verify(model, tmp_path / "back") == []
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")


def test_what_the_engine_and_an_export_are_told(model: Path) -> None:
    quantise(model)
    spec = read_spec(model)
    assert spec.block_fp8 and spec.engine_fields["quantization_config"] is None
    assert config_changes(spec, "lm")["quantization_config"] is None


@pytest.mark.parametrize("changes", [{"weight_block_size": [64, 128]}, {"quant_method": "gptq"}])
def test_other_kinds_are_refused(model: Path, changes: dict) -> None:
    quantise(model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] |= changes
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantised weights"):
        read_spec(model)
