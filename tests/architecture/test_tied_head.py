"""Models that config.json calls tied: with no output layer, with a copy of the embedding, and with one of their own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.architecture import tied_head
from hybridflow.architecture.spec import config_changes, read_spec
from hybridflow.architecture.weights import embedding
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.errors import CheckpointError
from tests.tiny_models import FAMILIES, make_checkpoints

EMBEDDING = "model.embed_tokens.weight"
Change = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("tied"), family="qwen3", tied=True) / "policy"


def with_head(source: Path, target: Path, change: Change, *, num_files: int = 1) -> Path:
    """The model with an lm_head.weight that `change` makes of the embedding; its config.json says tied."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = change(tensors[EMBEDDING].clone())
    if num_files == 1:
        save_file(tensors, target / "model.safetensors")
        return target
    files = {name: f"model-{1 + (name == EMBEDDING)}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: x for name, x in tensors.items() if files[name] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return target


def last_bit(x: Tensor) -> Tensor:
    x.view(torch.int32)[-1, -1] ^= 1
    return x


CHANGES: dict[str, tuple[Change, bool]] = {  # and whether the model is tied
    "a copy": (lambda x: x, True),
    "the last bit of the last row": (last_bit, False),
    "another head": (torch.randn_like, False),
    "rounded": (lambda x: x.bfloat16(), False),
    "fewer rows": (lambda x: x[:-1].clone(), False),
}


@pytest.mark.parametrize("num_files", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_tied_where_the_tensors_are_equal(
    name: str, num_files: int, tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tied_head, "PIECE_BYTES", 1000)  # a few rows
    change, is_tied = CHANGES[name]
    spec = read_spec(with_head(tied, tmp_path / "model", change, num_files=num_files))
    assert spec.tied == is_tied
    assert config_changes(spec, "lm") == ({} if is_tied else {"tie_word_embeddings": False})


def test_copies_of_another_dtype_or_of_odd_numbers_are_copies(tied: Path, tmp_path: Path) -> None:
    tensors = load_file(tied / "model.safetensors")
    odd = tensors[EMBEDDING].bfloat16().float()
    odd[3, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    target = with_head(tied, tmp_path / "model", lambda x: x)
    save_file(tensors | {EMBEDDING: odd, "lm_head.weight": odd.bfloat16()}, target / "model.safetensors")
    assert read_spec(target).tied


def test_without_a_head_or_without_weights(tied: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tied / "config.json").read_bytes())
    assert read_spec(tied).tied and read_spec(tmp_path).tied


def test_nothing_is_read_of_a_model_that_is_not_said_to_be_tied(tied: Path, tmp_path: Path) -> None:
    target = with_head(tied, tmp_path / "model", torch.randn_like)
    config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").write_bytes(b"damaged")
    assert not read_spec(target).tied


def test_a_damaged_file_is_named(tied: Path, tmp_path: Path) -> None:
    target = with_head(tied, tmp_path / "model", torch.randn_like)
    (target / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is damaged or cut short"):
        read_spec(target)


@pytest.mark.parametrize("name", ["a copy", "the last bit of the last row"])
def test_in_a_torch_dist_directory(name: str, tied: Path, tmp_path: Path) -> None:
    """Made as of an untied model; its config.json then says tied."""
    change, is_tied = CHANGES[name]
    source = with_head(tied, tmp_path / "model", change)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    to_megatron(source, tmp_path / "megatron")
    assert not read_spec(tmp_path / "megatron").tied
    (tmp_path / "megatron" / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path / "megatron").tied == is_tied


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_looked_for_where_the_table_has_them(family: str, tmp_path: Path) -> None:
    spec = read_spec(make_checkpoints(tmp_path, family=family, tied=True) / "policy")
    assert embedding(spec).hf == (spec.traits.embedding.name,)
