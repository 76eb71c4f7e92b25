"""Slices of safetensors files, and damaged ones: errors that name the file and, where there is one, the tensor."""

import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.errors import CheckpointError
from hybridflow.formats import file_bytes
from hybridflow.formats.safetensors_files import ALL, DTYPES, SafetensorsDirectory, TensorInfo


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
    assert torch.equal(files.read("a.weight", (6, 5), slice(2, 5)), weight[2:5])
    assert torch.equal(files.read("a.weight", (6, 5), ALL, slice(1, 4)), weight[:, 1:4])
    assert torch.equal(files.read("a.weight", (6, 5), columns=slice(3, None)), weight[:, 3:])
    assert torch.equal(files.read("a.weight", (6, 5), slice(1, 3), slice(2, 4)), weight[1:3, 2:4])
    assert torch.equal(files.read("a.bias", (6,), slice(4, 6)), written["a.bias"][4:])
    assert files.read("a.weight", (6, 5), slice(6, 6)).shape == (0, 5)  # a rank that holds padding only


def test_tensors_says_shape_and_dtype_before_anything_is_read(tmp_path: Path) -> None:
    written = write_shards(tmp_path)
    files = SafetensorsDirectory(tmp_path)
    assert files.tensors == {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in written.items()}
    assert files.file_of("b.weight") == tmp_path / "model-00002-of-00002.safetensors"


def test_any_rows_and_columns_are_those_of_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small buffers, so that every way to read is taken: to its place, through one buffer, in pieces, by rows."""
    generator, rng = torch.Generator().manual_seed(1), random.Random(1)
    shapes = {
        "a": (7, 33),
        "b": (64, 64),
        "c": (5, 6, 7),
        "d": (300,),
        "e": (),
        "f": (1, 50),
        "g": (0, 4),
        "h": (90, 3),
    }
    written = {
        name: torch.randn(shape, generator=generator).to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))
        for name, shape in shapes.items()
    }
    save_file(written, tmp_path / "model.safetensors")
    files = SafetensorsDirectory(tmp_path)
    for _ in range(600):
        name = rng.choice(list(shapes))
        monkeypatch.setattr(file_bytes, "PIECE_BYTES", rng.choice([8, 100, 1000, 1 << 20]))
        monkeypatch.setattr(file_bytes, "LONG_RUN_BYTES", rng.choice([1, 40, 1 << 20]))
        parts = [slice(*sorted((rng.randint(0, n), rng.randint(0, n)))) for n in shapes[name][:2]]
        expected = written[name][tuple(parts)] if parts else written[name]
        found = files.read(name, shapes[name], *parts)
        assert found.is_contiguous() and torch.equal(found, expected), (name, parts)


def test_what_is_read_is_memory_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000, 10)}, file)
    found = SafetensorsDirectory(tmp_path).read("a", (1000, 10), slice(10, 20))
    file.write_bytes(bytes(file.stat().st_size))
    assert found.sum() == 100 and found.untyped_storage().nbytes() == 400
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert not any(os.path.realpath(link) == str(file) for link in Path("/proc/self/fd").iterdir())


def test_every_dtype_of_torch_that_safetensors_writes_is_known(tmp_path: Path) -> None:
    written = {name: torch.zeros(3, 8).to(dtype) for name, dtype in DTYPES.items()}
    save_file(written, tmp_path / "model.safetensors")
    assert {name: info.dtype for name, info in SafetensorsDirectory(tmp_path).tensors.items()} == DTYPES


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
    expected = f"{shard}: no such file; model.safetensors.index.json lists it, with b.weight and 0 more tensors"
    assert failure(tmp_path) == expected


@pytest.mark.parametrize(
    "content",
    [
        *["", "{", "[]", "null", "\0", "\xff", "[" * 100_000, '{"metadata": {}}', '{"weight_map": []}'],
        *['{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "pytorch_model.bin"}}'],
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": {"\\ud800": "x.safetensors"}}',
        *[
            json.dumps({"weight_map": {"a": name}})
            for name in ("../x.safetensors", "/x.safetensors", "x\0.safetensors")
        ],
    ],
)
def test_a_damaged_index(content: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content, encoding="latin-1")
    assert failure(tmp_path).startswith(f"{index}: is no index of safetensors files: ")


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
def test_a_file_cut_short(kept: int, tmp_path: Path) -> None:
    write_shards(tmp_path)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept])
    assert failure(tmp_path).startswith(f"{shard}: is damaged or cut short: ")


F32X4 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def safetensors_bytes(header: dict | list, num_bytes: int) -> bytes:
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
        safetensors_bytes({"a": F32X4, "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, 24),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}}, 16),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}, 0),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}, 16),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, 4),
        safetensors_bytes({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}}, 16),
        safetensors_bytes({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, 2),
        safetensors_bytes({"a": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}, 16),
        safetensors_bytes({"a": {"shape": [4], "data_offsets": [0, 16]}}, 16),
        safetensors_bytes({"a": [4]}, 16),
        safetensors_bytes({"__metadata__": [], "a": F32X4}, 16),
        safetensors_bytes([], 0),
        struct.pack("<Q", 24) + b'{"a":{"dtype":"F32", "a"',
        struct.pack("<Q", 20) + b'{"a": [1], "a": [1]}',
        struct.pack("<Q", 4) + b"\xff\xfe{}",
    ],
    ids=[
        *["header_length", "too_few_bytes", "too_many_bytes", "shape_against_bytes", "hole", "overlap"],
        *["negative", "absurd", "float", "bool", "three_offsets", "dtype", "dtype_list", "no_dtype", "no_object"],
        *["metadata", "no_header_object", "no_json", "twice", "utf16"],
    ],
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
    shard = tmp_path / "model-00001-of-00002.safetensors"
    assert failure(tmp_path) == f"{shard}: no tensor c.weight in it, which {index.name} says is there"


@pytest.mark.parametrize(("dtype", "named"), [(torch.int8, "I8"), (torch.float64, "F64"), (torch.bool, "BOOL")])
def test_a_dtype_that_is_no_weight(dtype: torch.dtype, named: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, dtype=dtype)}, file)
    expected = f"{file}: a is {named}; float32, bfloat16 and float16 weights can be read"
    assert failure(tmp_path, "a", (3,)) == expected + ("; the checkpoint looks quantised" if named == "I8" else "")


# --------------------------------------------------------------------------------------------------- which files


def test_shards_that_disagree_with_the_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = tmp_path / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    del tree["weight_map"]["a.bias"]
    index.write_text(json.dumps(tree))
    assert failure(tmp_path) == f"{first}: holds a.bias, which {index.name} does not list"
    tree["weight_map"]["a.bias"] = second.name
    index.write_text(json.dumps(tree))
    assert failure(tmp_path) == f"{first}: a.bias is here, {index.name} says it is in {second.name}"
    save_file(tensors(), second)
    assert failure(tmp_path) in [f"{second}: {name} is in {first.name} too" for name in ("a.weight", "a.bias")]


@pytest.mark.parametrize("name", ["model.safetensors", "model-00003-of-00003.safetensors"])
def test_weights_beside_those_of_the_index_are_ambiguous(name: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file(tensors(), tmp_path / "adapter_model.safetensors")
    SafetensorsDirectory(tmp_path)
    save_file(tensors(), tmp_path / name)
    message = "model.safetensors.index.json does not list this file, so it is not clear which weights are the model's"
    assert failure(tmp_path).startswith(f"{tmp_path / name}: {message}")


def test_shards_without_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.unlink()
    expected = f"{index}: no such file, but there is model-00001-of-00002.safetensors: its index is missing"
    assert failure(tmp_path) == expected


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / name)
    message = failure(tmp_path)
    assert message.startswith(f"{tmp_path / name}: pickled weights are refused") and "save_pretrained" in message


def test_what_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.mkdir()
    assert failure(tmp_path) == f"{file}: is no file"
    file.rmdir()
    os.mkfifo(file)
    assert failure(tmp_path) == f"{file}: is no file"
    file.unlink()
    file.symlink_to(file)
    assert failure(tmp_path).startswith(f"{file}: ")


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, file)
    files = SafetensorsDirectory(tmp_path)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"^{file}: is damaged or cut short: no byte "):
        files.read("a", (100,))
    file.unlink()
    with pytest.raises(CheckpointError, match=f"^{file}: no such file$"):
        files.read("a", (100,))


def test_damage_at_random_gives_nothing_but_checkpoint_errors(tmp_path: Path) -> None:
    file, rng, refused = tmp_path / "model.safetensors", random.Random(2), 0
    save_file(tensors(), file)
    sound = file.read_bytes()
    header_end = 8 + int.from_bytes(sound[:8], "little")
    for _ in range(300):
        damaged = bytearray(sound[: rng.choice([len(sound), rng.randrange(len(sound))])])
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(max(min(header_end, len(damaged)), 1))
            damaged[position : position + 1] = rng.choice([b"", bytes([rng.randrange(256)]), b"0", b'"'])
        file.write_bytes(damaged)
        try:
            files = SafetensorsDirectory(tmp_path)
            for name, info in files.tensors.items():
                files.read(name, info.shape)
        except CheckpointError as error:
            assert str(file) in str(error)
            refused += 1
    assert refused > 200
