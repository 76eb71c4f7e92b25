"""Slices of safetensors files, and damaged ones: errors that name the file and, where there is one, the tensor."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.errors import CheckpointError
from hybridflow.models.checkpoint_files import SafetensorsDirectory


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(6, 5, generator=generator),
        "a.bias": torch.randn(6, generator=generator).bfloat16(),
        "b.weight": torch.randn(4, 3, generator=generator).half(),
    }


def write_shards(path: Path) -> dict[str, Tensor]:
    """a.* in the first of two shards, b.* in the second."""
    written = tensors()
    files = {name: f"model-0000{1 + (name[0] == 'b')}-of-00002.safetensors" for name in written}
    for file in set(files.values()):
        save_file({name: x for name, x in written.items() if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return written


def failure(path: Path, name: str | None = None, shape: tuple[int, ...] = ()) -> str:
    """The message of the error in opening `path`, or in reading a tensor from it."""
    if name is None:
        with pytest.raises(CheckpointError) as caught:
            SafetensorsDirectory(path)
    else:
        files = SafetensorsDirectory(path)
        with pytest.raises(CheckpointError) as caught:
            files.read(name, shape)
    return str(caught.value)


# --------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("sharded", [False, True])
def test_whole_tensors_and_slices_are_read_bitwise(sharded: bool, tmp_path: Path) -> None:
    written = write_shards(tmp_path) if sharded else tensors()
    if not sharded:
        save_file(written, tmp_path / "model.safetensors")
    files = SafetensorsDirectory(tmp_path)
    for name, x in written.items():
        found = files.read(name, tuple(x.shape))
        assert found.dtype == x.dtype
        assert torch.equal(found, x)
    weight = written["a.weight"]
    assert torch.equal(files.read("a.weight", (6, 5), 0, 2, 5), weight[2:5])
    assert torch.equal(files.read("a.weight", (6, 5), 1, 1, 4), weight[:, 1:4])
    assert torch.equal(files.read("a.weight", (6, 5), dim=1, start=3), weight[:, 3:])
    assert torch.equal(files.read("a.bias", (6,), 0, 4, 6), written["a.bias"][4:])
    assert files.read("a.weight", (6, 5), 0, 6, 6).shape == (0, 5)  # a rank that holds padding only


def test_contains(tmp_path: Path) -> None:
    write_shards(tmp_path)
    files = SafetensorsDirectory(str(tmp_path))
    assert "a.bias" in files and "b.weight" in files
    assert "score.weight" not in files


# --------------------------------------------------------------------------------------------------- refused


def test_no_file(tmp_path: Path) -> None:
    expected = f"{tmp_path / 'model.safetensors'}: no such file; weights are read from safetensors"
    assert failure(tmp_path) == expected


def test_a_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    assert failure(tmp_path) == f"{shard}: no such file; weights are read from safetensors"


@pytest.mark.parametrize(
    "content", ["{", "[]", "null", '{"metadata": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_a_damaged_index(content: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    assert failure(tmp_path).startswith(f"{index}: is no index of safetensors files: ")


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
def test_a_file_cut_short(kept: int, tmp_path: Path) -> None:
    write_shards(tmp_path)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept])
    assert failure(tmp_path).startswith(f"{shard}: is damaged or cut short: ")


def safetensors_bytes(header: dict, num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 1 << 40) + b"{}",  # a header longer than the file
        safetensors_bytes({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 12),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 20),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}, 16),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}}, 20),
    ],
    ids=["header_length", "too_few_bytes", "too_many_bytes", "shape_against_bytes", "hole"],
)
def test_a_header_that_lies_about_sizes(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert failure(tmp_path).startswith(f"{file}: is damaged or cut short: ")


def test_the_honest_header_of_the_same_making_is_read(tmp_path: Path) -> None:
    honest = safetensors_bytes({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 16)
    (tmp_path / "model.safetensors").write_bytes(honest)
    assert SafetensorsDirectory(tmp_path).read("a", (4,)).tolist() == [0.0] * 4


def test_a_wrong_shape_names_file_tensor_and_both_shapes(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    expected = f"{tmp_path / 'model.safetensors'}: a.weight has shape (6, 5), config.json asks for (5, 6)"
    assert failure(tmp_path, "a.weight", (5, 6)) == expected


def test_a_missing_tensor_names_the_files_searched(tmp_path: Path) -> None:
    write_shards(tmp_path)
    names = "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    assert failure(tmp_path, "c.weight", (1,)) == f"{tmp_path}: no tensor c.weight in {names}"


def test_a_tensor_that_only_the_index_knows(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    tree["weight_map"]["c.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(tree))
    assert failure(tmp_path, "c.weight", (1,)).startswith(f"{tmp_path}: no tensor c.weight in ")


@pytest.mark.parametrize(("dtype", "named"), [(torch.int8, "I8"), (torch.float64, "F64"), (torch.bool, "BOOL")])
def test_a_dtype_that_is_no_weight(dtype: torch.dtype, named: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, dtype=dtype)}, file)
    expected = f"{file}: a is {named}; float32, bfloat16 and float16 weights can be read"
    assert failure(tmp_path, "a", (3,)) == expected
