"""Which changes of a model directory the digest of its weights tells."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.convert.to_megatron import to_megatron
from hybridflow.errors import CheckpointError
from hybridflow.formats.weights_digest import weights_digest
from tests.tiny_models import make_checkpoints

TENSORS = {
    "a": torch.arange(1000.0).view(10, 100),
    "b": torch.ones(7, 3, 2, dtype=torch.bfloat16),
    "c": torch.tensor(2.0),
    "d": torch.zeros(0, 4),
}


def written(directory: Path, tensors: dict[str, torch.Tensor]) -> bytes:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return weights_digest(directory)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_tensor_that_was_trained_further_is_noticed(name: str, tmp_path: Path) -> None:
    """Though size and date of the file are the same."""
    before = written(tmp_path / "model", TENSORS)
    file = tmp_path / "model" / "model.safetensors"
    date, size = file.stat().st_mtime_ns, file.stat().st_size
    after = written(tmp_path / "model", TENSORS | {name: TENSORS[name] + 1})
    os.utime(file, ns=(date, date))
    assert file.stat().st_size == size and weights_digest(tmp_path / "model") == after != before


def test_names_dtypes_and_shapes_count_and_files_do_not(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", TENSORS)
    others = [
        {("e" if name == "a" else name): x for name, x in TENSORS.items()},
        TENSORS | {"a": TENSORS["a"].view(100, 10)},
        TENSORS | {"c": TENSORS["c"].double()},
    ]
    digests = {written(tmp_path / str(i), other) for i, other in enumerate(others)}
    assert len(digests | {whole}) == 4
    shards = tmp_path / "shards"
    shards.mkdir()
    listed = {name: f"model-0000{1 + (name > 'a')}-of-00002.safetensors" for name in TENSORS}
    for file in set(listed.values()):
        save_file({name: TENSORS[name] for name in TENSORS if listed[name] == file}, shards / file)
    index = ", ".join(f'"{name}": "{file}"' for name, file in listed.items())
    (shards / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{index}}}}}')
    assert weights_digest(shards) == whole


def test_of_torch_dist_too_and_of_nothing_it_is_an_error(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, family="llama", tied=False)
    digests = set()
    for name in ("policy", "reference"):
        to_megatron(tmp_path / name, tmp_path / f"{name}-megatron")
        digests |= {weights_digest(tmp_path / name), weights_digest(tmp_path / f"{name}-megatron")}
    assert len(digests) == 4
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        weights_digest(tmp_path / "empty")
