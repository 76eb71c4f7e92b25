"""What is wrong with a checkpoint is one message that names file and key; nothing is written, no code of it is run."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.convert.verify import verify
from hybridflow.errors import CheckpointError
from tests.tools.convert.tiny import INDEX, change_config, left_in, rewrite, tensors_of

SECOND = "model-00002-of-00002.safetensors"


def message(source: Path, convert: Callable = to_megatron) -> str:
    before = left_in(source.parent)
    with pytest.raises(CheckpointError) as caught:
        convert(source, source.with_name("target"))
    assert left_in(source.parent) == before
    return str(caught.value)


def assert_names(source: Path, *parts: object) -> None:
    text = message(source)
    for part in parts:
        assert str(part) in text, f"{part!r} is not in: {text}"


def change_header(file: Path, change: Callable[[dict], None]) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


# ------------------------------------------------------------------------------------------------- the weights


def test_a_missing_shard(source: Path) -> None:
    rewrite(source, tensors_of(source), num_files=2)
    (source / SECOND).unlink()
    assert_names(source, source / SECOND, "no such file", INDEX, "model.embed_tokens.weight")


def test_a_truncated_file(source: Path) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_names(source, file, "damaged or cut short")


@pytest.mark.parametrize("file", ["model.safetensors", INDEX, "config.json"])
def test_a_pointer_of_git_lfs_in_the_place_of_a_file(file: str, source: Path) -> None:
    (source / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3554214752\n")
    assert_names(source, source / file, "is a pointer of git-lfs", "git lfs pull")


def test_a_header_that_lies_about_its_size(source: Path) -> None:
    file = source / "model.safetensors"
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    assert_names(source, file, "its header has 1099511627776 bytes")


def test_a_header_that_lies_about_a_tensor(source: Path) -> None:
    file = source / "model.safetensors"
    change_header(file, lambda header: header["lm_head.weight"].update(shape=[100, 63]))
    assert_names(source, file, "lm_head.weight", "25200 bytes by dtype and shape")


def test_a_wrong_shape(source: Path) -> None:
    tensors = tensors_of(source)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)
    rewrite(source, tensors)
    assert_names(
        source,
        f"{source / 'model.safetensors'}: model.layers.1.mlp.up_proj.weight has shape (95, 64), "
        "config.json asks for (96, 64)",
    )


def test_a_transposed_weight(source: Path) -> None:
    tensors = tensors_of(source)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(96, 64)
    rewrite(source, tensors)
    assert_names(source, "model.layers.1.mlp.down_proj.weight", "(96, 64)", "(64, 96)")


def test_an_unexpected_tensor(source: Path) -> None:
    rewrite(source, tensors_of(source) | {"model.layers.0.self_attn.q_norm.weight": torch.zeros(8)})
    assert_names(source, source / "model.safetensors", "model.layers.0.self_attn.q_norm.weight is no weight")


def test_quantised_weights(source: Path) -> None:
    tensors = tensors_of(source)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    rewrite(source, tensors)
    assert_names(source, source / "model.safetensors", "lm_head.weight is F8_E4M3", "quantised")


def test_a_quantised_config(source: Path) -> None:
    change_config(source, quantization_config={"quant_method": "gptq", "bits": 4})
    assert_names(source, source / "config.json", "quantization_config", "quantised")


class Malicious:
    def __reduce__(self) -> tuple:
        return Path.touch, (Path("executed"),)


def test_pickled_weights_are_refused_unread(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    assert_names(source, source / "pytorch_model.bin", "pickled weights are refused")
    assert not (tmp_path / "executed").exists()


def test_a_pickled_metadata_runs_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    to_megatron(source, tmp_path / "megatron")
    for name in (".metadata", "common.pt"):
        (tmp_path / "megatron" / name).write_bytes(pickle.dumps(Malicious()))
    assert str(tmp_path / "megatron" / ".metadata") in message(tmp_path / "megatron", to_huggingface)
    assert not (tmp_path / "executed").exists()


# ------------------------------------------------------------------------------------------------- config.json


def test_an_unknown_architecture(source: Path) -> None:
    change_config(source, architectures=["Qwen2ForCausaLM"])
    assert_names(source, source / "config.json", "'Qwen2ForCausaLM'", "nearest known one is Qwen2ForCausalLM")
    change_config(source, architectures=["MambaForCausalLM"])
    assert_names(source, "known are LlamaForCausalLM", "MixtralForCausalLM")


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "rms_norm_eps", "vocab_size"])
def test_a_config_with_a_missing_field(field: str, source: Path) -> None:
    change_config(source, **{field: None})
    assert_names(source, source / "config.json", f"{field} is missing")


def test_no_config_and_no_directory(source: Path, tmp_path: Path) -> None:
    (source / "config.json").unlink()
    assert_names(source, source / "config.json", "no such file")
    assert message(tmp_path / "absent") == f"{tmp_path / 'absent'}: no such directory"


def test_the_other_kind_of_directory(source: Path, tmp_path: Path) -> None:
    assert "is a HuggingFace directory already; hf-to-megatron converts it" in message(source, to_huggingface)
    to_megatron(source, tmp_path / "megatron")
    assert "is a megatron checkpoint already; megatron-to-hf converts it" in message(tmp_path / "megatron")


# ------------------------------------------------------------------------------------------------- remote code


def with_code(source: Path) -> None:
    """modeling_custom.py lies there already; the file ends every process that runs it."""
    change_config(source, auto_map={"AutoModelForCausalLM": "modeling_custom.LlamaForCausalLM"})


def test_code_and_what_names_it_stay_behind(source: Path, tmp_path: Path) -> None:
    with_code(source)
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    for path in (tmp_path / "megatron", tmp_path / "back"):
        assert not list(path.glob("*.py"))
        assert "auto_map" not in json.loads((path / "config.json").read_text())
    assert verify(source, tmp_path / "back") == []


def test_trusted_code_goes_along_and_is_not_run(source: Path, tmp_path: Path) -> None:
    with_code(source)
    to_megatron(source, tmp_path / "megatron", trust_remote_code=True)
    to_huggingface(tmp_path / "megatron", tmp_path / "back", trust_remote_code=True)
    for path in (tmp_path / "megatron", tmp_path / "back"):
        assert (path / "modeling_custom.py").read_bytes() == (source / "modeling_custom.py").read_bytes()
        assert "auto_map" in json.loads((path / "config.json").read_text())
    assert verify(source, tmp_path / "back") == []
