"""torch_dist directories: boxes of tensors, megatron's own checkpoints both ways, and damage of every kind."""

import json
import os
import pickle
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weight_files import (
    MegatronDirectory,
    open_checkpoint,
    write_distributed,
)
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_directory import DistributedDirectory, is_distributed
from hybridflow.formats.distributed_storage import Chunk
from hybridflow.formats.safetensors_files import SafetensorsDirectory, TensorInfo
from tests.architecture.weight_files_worker import MODELS, NUM_RANKS
from tests.architecture.whole_weights import SHARES, chunk_of, layer_chunks, share_chunks, source_tensors, whole_weights
from tests.launch import run_ranks
from tests.messages import like
from tests.tiny_models import make_checkpoints


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ROOT/NAME/policy and ours of every model, and what the worker writes."""
    root = tmp_path_factory.mktemp("distributed")
    for name, (family, tied, num_kv_heads) in MODELS.items():
        make_checkpoints(root / name, family=family, tied=tied, num_layers=4, num_kv_heads=num_kv_heads)
        spec = read_spec(root / name / "policy")
        write_distributed(root / name / "ours", layer_chunks(whole_weights(source_tensors(spec), spec)))
    run_ranks(NUM_RANKS, "tests.architecture.weight_files_worker", root)
    return root


# --------------------------------------------------------------------------------------------------- megatron


def expected_shard(name: str, whole: dict[str, Tensor], spec: ModelSpec, rank: int) -> Tensor:
    """What megatron documents for tp 2, pp 2: rows of its halves, columns of what follows them."""
    tp_rank, stage = rank % 2, rank // 2
    layer, key, norms = None, name, {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
    if not spec.num_experts:
        norms["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    if name.startswith("decoder.layers."):
        _, _, number, rest = name.split(".", 3)
        layer, expert = int(number) + stage * spec.num_layers // 2, None
        if "local_experts." in rest:
            before, expert, after = rest.replace("local_experts.", "/").partition("/")[0], *rest.split(".")[3:4], rest
            rest, expert = f"{before}experts.{after.split('.', 4)[4]}", int(expert)
        tensor = whole["decoder.layers." + norms.get(rest, rest)][layer]
        tensor = tensor if expert is None else tensor[expert]
    else:
        tensor = whole[key if key in whole else "embedding.word_embeddings.weight"]  # tied
    if "norm" in name or "router" in name:
        return tensor
    if "linear_proj" in name or "linear_fc2" in name:
        return tensor.chunk(2, dim=1)[tp_rank]
    if "linear_fc1" in name:
        return torch.cat([half.chunk(2)[tp_rank] for half in tensor.chunk(2)])
    if "linear_qkv" in name:
        return tensor.chunk(2)[tp_rank]
    padding = tensor.new_zeros(spec.padded_vocab_size - len(tensor), tensor.shape[1])
    return torch.cat([tensor, padding]).chunk(2)[tp_rank]


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("name", MODELS)
def test_megatron_loads_what_we_wrote(root: Path, name: str) -> None:
    spec = read_spec(root / name / "policy")
    whole = whole_weights(source_tensors(spec), spec)
    for rank in range(NUM_RANKS):
        loaded = torch.load(root / name / f"rank_{rank}.pt")
        assert len(loaded) > 8
        for parameter, found in loaded.items():
            expected = expected_shard(parameter, whole, spec, rank)
            rows = len(expected)
            if "embedding" in parameter or "output_layer" in parameter:  # rows past the vocabulary are nobody's
                rows = min(rows, max(spec.vocab_size - rank % 2 * rows, 0))
            assert found.shape == expected.shape and torch.equal(found[:rows], expected[:rows]), parameter


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ours", "stacked", "single"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_read_by_their_huggingface_names(root: Path, name: str, kind: str) -> None:
    """stacked and single: what megatron saved at tp 2, pp 2, with optimizer state beside it."""
    spec = read_spec(root / name / "policy")
    source, files = source_tensors(spec), MegatronDirectory(root / name / kind, spec)
    assert files.unknown == files.missing == ()
    assert files.tensors == {key: TensorInfo(tuple(x.shape), x.dtype) for key, x in source.items()}
    for key, tensor in source.items():
        assert torch.equal(files.read(key, tuple(tensor.shape)), tensor), key
    stored = DistributedDirectory(root / name / kind)
    assert (sum(key.startswith("optimizer.") for key in stored.tensors) >= 8) == (kind != "ours")
    assert any("linear_qkv.weight" in key and "layers.3." in key for key in stored.tensors) == (kind == "single")


@pytest.mark.thorough
@pytest.mark.distributed
def test_any_rows_and_columns_from_any_layout(root: Path) -> None:
    rng = random.Random(0)
    for name in MODELS:
        spec = read_spec(root / name / "policy")
        source = source_tensors(spec)
        for kind in ("ours", "stacked", "single"):
            files = MegatronDirectory(root / name / kind, spec)
            for key, tensor in rng.sample(sorted(source.items()), 25):
                parts = [slice(*sorted((rng.randint(0, n), rng.randint(0, n)))) for n in tensor.shape]
                assert torch.equal(files.read(key, tuple(tensor.shape), *parts), tensor[tuple(parts)]), (key, parts)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["two", "four"])
def test_the_number_of_ranks_that_write_does_not_show(root: Path, name: str) -> None:
    files = DistributedDirectory(root / name)
    assert len(list((root / name).glob("*.distcp"))) == {"two": 2, "four": 4}[name]
    for key, tensor in SHARES.items():
        assert torch.equal(files.read(key, (0,) * tensor.dim(), tuple(tensor.shape)), tensor)


@pytest.mark.thorough
@pytest.mark.distributed
def test_an_error_in_a_rank_is_every_ranks(root: Path) -> None:
    assert {(root / f"error_{rank}").read_text() for rank in range(NUM_RANKS)} == {"rank 2 cannot read this"}
    assert not (root / "broken" / ".metadata").exists() and not is_distributed(root / "broken")


# --------------------------------------------------------------------------------------------------- writing


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_distributed(tmp_path / "written", share_chunks(0, 1))
    return tmp_path / "written"


def test_dcp_loads_what_we_wrote(written: Path) -> None:
    state = {key: torch.zeros_like(tensor) for key, tensor in SHARES.items()}
    dcp.load(state, checkpoint_id=written, no_dist=True)
    assert all(torch.equal(state[key], tensor) for key, tensor in SHARES.items())
    assert is_distributed(written)


def test_the_same_chunks_make_the_same_bytes(written: Path, tmp_path: Path) -> None:
    write_distributed(tmp_path / "again", share_chunks(0, 1))
    names = sorted(file.name for file in written.iterdir())
    assert names == [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    assert all((written / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_one_chunk_at_a_time_is_in_memory(tmp_path: Path) -> None:
    alive, most, sizes = set(), 0, []

    def read() -> Tensor:
        nonlocal most
        tensor = torch.zeros(1, 50)
        weakref.finalize(tensor, alive.discard, id(tensor))
        alive.add(id(tensor))
        most = max(most, len(alive))
        return tensor

    chunks = [Chunk("a", (i, 0), (1, 50), (20, 50), torch.float32, read) for i in range(20)]
    before = torch.serialization.get_crc32_options()
    write_distributed(tmp_path, chunks, written=sizes.append)
    assert (most, sizes) == (1, [200] * 20)
    assert torch.serialization.get_crc32_options() == before


def test_a_view_is_written_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    large = torch.randn(1000, 10)
    write_distributed(tmp_path, [chunk_of("a", (0, 0), large[:, :2], (1000, 2))])
    assert (tmp_path / "__0_0.distcp").stat().st_size < 12_000
    assert torch.equal(DistributedDirectory(tmp_path).read("a", (0, 0), (1000, 2)), large[:, :2])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([0, 4], "its chunks have 8 elements, shape (10,) has 10"), ([0, 3, 6], "its chunks have 12")],
)
def test_chunks_that_do_not_cover_their_tensor_are_not_written(
    offsets: list[int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^a: ") as caught:
        write_distributed(tmp_path, [chunk_of("a", (start,), torch.zeros(4), (10,)) for start in offsets])
    assert message in str(caught.value)


# --------------------------------------------------------------------------------------------------- reading


def test_random_boxes_of_a_checkpoint_of_dcp(tmp_path: Path) -> None:
    """Tensors with odd strides and storages too, which lie in the file in another order."""
    generator, rng = torch.Generator().manual_seed(3), random.Random(3)
    base = torch.randn(9, 40, generator=generator)
    state = {"plain": base, "turned": base.t(), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    state["half"] = torch.randn(5, 6, 7, generator=generator).half()
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    files = DistributedDirectory(tmp_path)
    for _ in range(200):
        key, tensor = rng.choice(sorted(state.items(), key=lambda item: item[0]))
        ranges = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in tensor.shape]
        found = files.read(key, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))
        assert torch.equal(found, tensor[tuple(slice(a, b) for a, b in ranges)])
    assert files._starts[tmp_path / "__0_0.distcp", files._stored["turned"].chunks[0].start] is None
    assert None not in [
        start for (_, at), start in files._starts.items() if at == files._stored["plain"].chunks[0].start
    ]


def test_chunks_may_lie_anywhere(tmp_path: Path) -> None:
    tensor = torch.randn(7, 9)
    boxes = [((0, 0), (4, 5)), ((0, 5), (2, 4)), ((2, 5), (5, 4)), ((4, 0), (3, 5))]  # a pinwheel: no grid
    chunks = [chunk_of("a", o, tensor[o[0] : o[0] + n[0], o[1] : o[1] + n[1]], (7, 9)) for o, n in boxes]
    write_distributed(tmp_path, chunks)
    files = DistributedDirectory(tmp_path)
    for a in range(7):
        for b in range(9):
            assert torch.equal(files.read("a", (a, b), (7 - a, 9 - b)), tensor[a:, b:])


def test_objects_are_listed_and_not_read(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "step": {"nested": "text"}}, checkpoint_id=tmp_path, no_dist=True)
    files = DistributedDirectory(tmp_path)
    assert (tuple(files.tensors), files.objects) == (("a",), ("step.nested",))


# --------------------------------------------------------------------------------------------------- the model's


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    make_checkpoints(path, family="llama", tied=False)
    return path / "policy"


def written_weights(small: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> MegatronDirectory:
    spec = read_spec(small)
    whole = whole_weights(source_tensors(spec), spec)
    change(whole)
    write_distributed(target, layer_chunks(whole))
    return MegatronDirectory(target, spec)


def test_missing_and_unknown_weights_are_listed(small: Path, tmp_path: Path) -> None:
    def change(whole: dict[str, Tensor]) -> None:
        whole["decoder.layers.mlp.linear_fc3.weight"] = whole.pop("decoder.layers.mlp.linear_fc2.weight")
        whole["optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(3, 4)

    files = written_weights(small, tmp_path, change)
    assert files.unknown == ("decoder.layers.mlp.linear_fc3.weight",)
    assert files.missing == tuple(f"model.layers.{i}.mlp.down_proj.weight" for i in range(2))
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.mlp\.down_proj\.weight in \.metadata"):
        files.read("model.layers.0.mlp.down_proj.weight", (64, 96))


def test_norms_are_found_by_either_name_and_a_vocabulary_may_be_padded(small: Path, tmp_path: Path) -> None:
    def change(whole: dict[str, Tensor]) -> None:
        fused = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
        whole["decoder.layers.input_layernorm.weight"] = whole.pop(fused)
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            whole[key] = torch.cat([whole[key], torch.full((28, 64), float("nan"))])

    files = written_weights(small, tmp_path, change)
    assert files.unknown == files.missing == ()
    for key, tensor in source_tensors(read_spec(small)).items():
        assert torch.equal(files.read(key, tuple(tensor.shape)), tensor), key


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("decoder.final_layernorm.weight", (65,)),
        ("decoder.layers.mlp.linear_fc1.weight", (3, 192, 64)),
        ("decoder.layers.mlp.linear_fc2.weight", (2, 96, 64)),
        ("output_layer.weight", (96, 64)),
    ],
)
def test_a_wrong_shape_names_key_and_both_shapes(key: str, shape: tuple[int, ...], small: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        written_weights(small, tmp_path, lambda whole: whole.update({key: torch.zeros(shape)}))
    assert str(caught.value).startswith(f"{tmp_path / '.metadata'}: {key} has shape {shape}, config.json asks for (")


def test_a_dtype_that_is_no_weight(small: Path, tmp_path: Path) -> None:
    key = "decoder.final_layernorm.weight"
    files = written_weights(small, tmp_path, lambda whole: whole.update({key: whole[key].char()}))
    with pytest.raises(CheckpointError, match=f"{key} is I8; .*quantised"):
        files.read("model.norm.weight", (64,))


def test_which_kind_a_directory_is(small: Path, tmp_path: Path) -> None:
    spec = read_spec(small)
    written_weights(small, tmp_path, lambda whole: None)
    assert not is_distributed(small) and is_distributed(tmp_path)
    assert isinstance(open_checkpoint(small, spec), SafetensorsDirectory)
    assert isinstance(open_checkpoint(tmp_path, spec), MegatronDirectory)
    file = tmp_path / "metadata.json"
    file.write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(
        CheckpointError, match=f"^{file}: sharded_backend = 'zarr' is not supported, must be 'torch_dist'$"
    ):
        is_distributed(tmp_path)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=f"^{file}: is damaged: "):
        is_distributed(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"^{file}: no such file, but there is .metadata"):
        is_distributed(tmp_path)


# --------------------------------------------------------------------------------------------------- damaged


def failure(path: Path) -> str:
    """The message of the error in opening a directory and reading all of it."""
    with pytest.raises(CheckpointError) as caught:
        read_all(path)
    return str(caught.value)


def read_all(path: Path) -> dict[str, Tensor]:
    files = DistributedDirectory(path)
    return {key: files.read(key, (0,) * len(info.shape), info.shape) for key, info in files.tensors.items()}


def change_metadata(path: Path, change: Callable[[Metadata], None]) -> None:
    metadata = FileSystemReader(path).read_metadata()
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_pickle_that_would_run_code_runs_none(written: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    def change(metadata: Metadata) -> None:
        metadata.planner_data = Evil()

    change_metadata(written, change)
    message = failure(written)
    assert message.startswith(f"{written / '.metadata'}: is damaged or no metadata") and "posix.mkdir" in message
    assert not (tmp_path / "ran").exists()


def test_a_record_that_would_run_code_runs_none(written: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    file = written / "__0_0.distcp"
    torch.save(Evil(), file)
    size = file.stat().st_size

    def change(metadata: Metadata) -> None:
        first = first_info(metadata)
        first.offset, first.length = 0, size
        for key, tensor in metadata.state_dict_metadata.items():
            tensor.chunks = [first_chunk(metadata)] if key == "matrix" else []
            tensor.size = torch.Size([1, 6]) if key == "matrix" else torch.Size([0])

    change_metadata(written, change)
    assert failure(written).startswith(f"{file}: matrix, chunk at (0, 0): is damaged: ")
    assert not (tmp_path / "ran").exists()


def test_no_metadata(tmp_path: Path) -> None:
    assert failure(tmp_path) == f"{tmp_path / '.metadata'}: no such file"


@pytest.mark.parametrize("content", [b"", b"\x80", b"{}", pickle.dumps(3), pickle.dumps({"a": 1})])
def test_what_is_no_metadata(content: bytes, written: Path) -> None:
    (written / ".metadata").write_bytes(content)
    assert failure(written).startswith(
        f"{written / '.metadata'}: is damaged or no metadata of a distributed checkpoint: "
    )


def test_a_missing_and_a_cut_file(written: Path) -> None:
    file = written / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert failure(written) == like(f"{file}: is damaged or cut short: it has {size - 1} bytes, vector ends at {size}")
    file.unlink()
    assert failure(written) == f"{file}: no such file; .metadata lists it, with matrix"


def first_chunk(metadata: Metadata) -> ChunkStorageMetadata:
    return metadata.state_dict_metadata["matrix"].chunks[0]


def first_info(metadata: Metadata) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "matrix")


def second_info(metadata: Metadata) -> Any:
    return [info for index, info in metadata.storage_data.items() if index.fqn == "matrix"][1]


CHANGES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "outside of the tensor": (
        lambda m: setattr(first_chunk(m), "sizes", torch.Size([9, 6])),
        "matrix: the chunk at (0, 0) of size (9, 6) is not inside of shape (8, 6)",
    ),
    "other dimensions": (
        lambda m: setattr(first_chunk(m), "sizes", torch.Size([1])),
        "matrix: the chunk at (0, 0) of size (1,) is not inside of shape (8, 6)",
    ),
    "a hole": (
        lambda m: m.state_dict_metadata["matrix"].chunks.pop(),
        "matrix: its chunks have 42 elements, shape (8, 6) has 48",
    ),
    "overlap": (
        lambda m: (setattr(first_chunk(m), "sizes", torch.Size([2, 6])), m.state_dict_metadata["matrix"].chunks.pop()),
        "matrix: the chunk at (1, 0) overlaps another",
    ),
    "no file": (lambda m: m.storage_data.clear(), "matrix: the chunk at (0, 0) is in no file"),
    "outside of the directory": (
        lambda m: setattr(first_info(m), "relative_path", "../secret"),
        "matrix: the chunk at (0, 0) is in the file '../secret', outside of the directory",
    ),
    "absolute": (
        lambda m: setattr(first_info(m), "relative_path", "/etc/passwd"),
        "matrix: the chunk at (0, 0) is in the file '/etc/passwd', outside of the directory",
    ),
    "negative": (lambda m: setattr(first_info(m), "offset", -1), "matrix: the chunk at (0, 0) is at byte -1 and "),
    "compressed": (
        lambda m: setattr(first_info(m), "transform_descriptors", ["zstd"]),
        "matrix: the chunk at (0, 0) is compressed or otherwise transformed",
    ),
    "no dtype": (
        lambda m: setattr(m.state_dict_metadata["matrix"].properties, "dtype", "float32"),
        "matrix: it has no dtype",
    ),
    "a key that cannot be printed": (
        lambda m: m.state_dict_metadata.__setitem__("\ud800", m.state_dict_metadata["matrix"]),
        "the key '\\ud800' is not printable",
    ),
    "no storage": (lambda m: setattr(m, "storage_data", None), "storage_data is NoneType, must be dict"),
    "no shape": (
        lambda m: setattr(m.state_dict_metadata["matrix"], "size", [8, 6]),
        "matrix: size is list, must be tuple",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_lies(name: str, written: Path) -> None:
    change, message = CHANGES[name]
    change_metadata(written, change)
    assert failure(written).startswith(str(written / ".metadata")) and message in failure(written)


def test_bytes_that_belong_to_two_chunks(written: Path) -> None:
    change_metadata(written, lambda m: setattr(first_info(m), "offset", second_info(m).offset))
    file, start = written / "__0_0.distcp", second_info(FileSystemReader(written).read_metadata()).offset
    assert failure(written) == f"{file}: byte {start} belongs to matrix and to matrix by .metadata"


def test_another_dtype_or_shape_than_the_record_has(written: Path) -> None:
    change_metadata(written, lambda m: setattr(m.state_dict_metadata["matrix"].properties, "dtype", torch.float16))
    expected = "is damaged: it holds torch.float32 of shape (1, 6), the metadata says torch.float16 of shape (1, 6)"
    assert failure(written) == f"{written / '__0_0.distcp'}: matrix, chunk at (0, 0): {expected}"


def test_damage_at_random_gives_nothing_but_checkpoint_errors(tmp_path: Path) -> None:
    """Bits of the metadata, and of the archives' own structure; a changed payload is another value, not an error."""
    chunks = [chunk_of(key, (0,) * x.dim(), x, tuple(x.shape)) for key, x in SHARES.items()]
    write_distributed(tmp_path, chunks)
    rng, refused = random.Random(4), 0
    sound = {name: (tmp_path / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
    for _ in range(400):
        name = rng.choice(list(sound))
        damaged = bytearray(sound[name])
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])
        try:
            read_all(tmp_path)
        except CheckpointError as error:
            assert str(tmp_path) in str(error)
            refused += 1
        (tmp_path / name).write_bytes(sound[name])
    assert refused > 200
