"""Records written without collectives: what torch itself reads of them, their sums, and what goes wrong on the way."""

import os
import resource
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

from hybridflow.errors import CheckpointError
from hybridflow.formats import distributed_metadata
from hybridflow.formats.distributed_directory import DistributedDirectory
from hybridflow.formats.distributed_storage import Chunk, ChunkRecord, FileSum, save, write_metadata, write_records

WHOLE = {
    "matrix": torch.arange(24.0).view(4, 6),
    "half": torch.linspace(-1, 1, 10).bfloat16(),
    "steps": torch.tensor([3.0], dtype=torch.float64),
    "numbers": torch.arange(7),
}


def chunk(key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Chunk:
    """Whose memory is a view with strides where the box is no block of rows."""
    whole = WHOLE[key]
    box = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    return Chunk(key, offset, shape, tuple(whole.shape), whole.dtype, read=lambda: box)


SHARES = (
    [chunk("matrix", (0, 0), (4, 2)), chunk("half", (0,), (3,)), chunk("numbers", (0,), (7,))],
    [chunk("half", (3,), (7,)), chunk("matrix", (0, 2), (3, 4)), chunk("matrix", (3, 2), (1, 4))],
    [chunk("steps", (0,), (1,))],
    [],
)


def write_shares(directory: Path) -> tuple[list[ChunkRecord], dict[str, FileSum]]:
    records, sums = [], {}
    for rank, chunks in enumerate(SHARES):
        name = f"__{rank}_0.distcp"
        its, sums[name] = write_records(directory, name, chunks, ["layer._extra_state"] if rank == 1 else [])
        records += its
    return records, sums


def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    """By its own reader, whole."""
    (tmp_path / "checkpoint").mkdir()
    records, _ = write_shares(tmp_path / "checkpoint")
    write_metadata(tmp_path / "checkpoint", records)
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert found.pop("layer._extra_state") == [None]
    assert found.keys() == WHOLE.keys()
    assert all(found[key].dtype == x.dtype and torch.equal(found[key], x) for key, x in WHOLE.items())
    ours = DistributedDirectory(tmp_path / "checkpoint")
    assert ours.objects == ("layer._extra_state",)
    assert all(torch.equal(ours.read(key, (0,) * x.dim(), tuple(x.shape)), x) for key, x in WHOLE.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # that is meant
def test_torch_loads_into_other_shapes(tmp_path: Path) -> None:
    records, _ = write_shares(tmp_path)
    write_metadata(tmp_path, records)
    state = {"matrix": torch.zeros(4, 6), "half": torch.zeros(10, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(x, WHOLE[key]) for key, x in state.items())


def test_sums_are_of_the_bytes_on_the_disk(tmp_path: Path) -> None:
    records, sums = write_shares(tmp_path)
    for name, its in sums.items():
        data = (tmp_path / name).read_bytes()
        assert its == FileSum(len(data), zlib.crc32(data))
        places = sorted((record.start, record.length) for record in records if record.file == name)
        ends = [0, *(start + length for start, length in places)]
        assert [start for start, _ in places] == ends[:-1] and ends[-1] == len(data), "one after the other"
    assert sums["__3_0.distcp"] == FileSum(0, 0), "of a rank that has nothing to write"


def test_the_same_chunks_are_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        write_metadata(tmp_path / name, write_shares(tmp_path / name)[0])
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_every_file_is_synced_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[str, int] = {}
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced[os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))] = os.fstat(fd).st_size
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    records, sums = write_shares(tmp_path)
    assert synced == {name: its.size for name, its in sums.items()}
    write_metadata(tmp_path, records)
    assert synced[".metadata"] == (tmp_path / ".metadata").stat().st_size > 0


def test_torch_alone_does_not_sync_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why we do; once this fails it is no longer needed."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    FileSystemWriter(tmp_path).finish(Metadata({}), [])
    assert synced == [0] and (tmp_path / ".metadata").stat().st_size > 0


def test_a_slice_is_written_without_the_rest_of_its_memory(tmp_path: Path) -> None:
    large = torch.zeros(1000, 1000)
    large[1, 1] = 5.0
    part = Chunk("x", (0,), (2,), (2,), large.dtype, read=lambda: large[1, :2])
    records, its = write_records(tmp_path, "file", [part])
    assert its.size < 2000
    write_metadata(tmp_path, records)
    assert DistributedDirectory(tmp_path).read("x", (0,), (2,)).tolist() == [0.0, 5.0]


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    told: list[int] = []
    write_records(tmp_path, "file", SHARES[0], written=told.append)
    assert told == [32, 6, 56]


def without(records: list[ChunkRecord], key: str) -> list[ChunkRecord]:
    """Without the first of its chunks."""
    first = next(record for record in records if record.key == key)
    return [record for record in records if record is not first]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda records: without(records, "matrix"), r"matrix: its chunks have 16 elements, shape \(4, 6\) has 24"),
        (lambda records: [*records, records[0]], r"matrix: its chunks have 32 elements, shape \(4, 6\) has 24"),
        (
            lambda records: [*without(records, "half"), ChunkRecord("half", (4,), (3,), (10,), "bfloat16", "f", 0, 1)],
            r"half: the chunk at \(4,\) overlaps another",
        ),
        (
            lambda records: [*records, ChunkRecord("half", (0,), (1,), (11,), "bfloat16", "f", 0, 1)],
            r"half: its chunks are of tensors of torch\.Size\(\[10\]\) and torch\.Size\(\[11\]\)",
        ),
    ],
    ids=["missing", "twice", "overlap", "another whole"],
)
def test_chunks_must_cover_every_tensor_once(
    change: Callable[[list[ChunkRecord]], list[ChunkRecord]], message: str, tmp_path: Path
) -> None:
    records, _ = write_shares(tmp_path)
    with pytest.raises(ValueError, match=message):
        write_metadata(tmp_path, change(records))
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("max_cells", [0, 1 << 24])
def test_overlaps_are_found_however_many_edges_there_are(
    max_cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four boxes of 2 x 3 of layer 1, the last of which begins a column early; layer 0 is whole."""
    monkeypatch.setattr(distributed_metadata, "MAX_CELLS", max_cells)
    boxes = [((0, 0, 0), (1, 4, 6)), *(((1, row, column), (1, 2, 3)) for row in (0, 2) for column in (0, 3))]
    records = [ChunkRecord("x", *box, (2, 4, 6), "bfloat16", "f", i, 1) for i, box in enumerate(boxes)]
    write_metadata(tmp_path, records)
    (tmp_path / ".metadata").unlink()
    records[-1] = replace(records[-1], offset=(1, 2, 2))
    with pytest.raises(ValueError, match=r"x: the chunk at \(1, 2, 2\) overlaps another"):
        write_metadata(tmp_path, records)


# ------------------------------------------------------------------------------------------------ failures


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may have more than 10,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [20_000, 200, 2_490])
def test_a_disk_that_is_full_is_named(size: int, tmp_path: Path, small_files: None) -> None:
    """In the middle of a tensor, between tensors, or with what is written last."""
    chunks = [Chunk(str(i), (0,), (size,), (size,), torch.float32, lambda: torch.zeros(size)) for i in range(20)]
    with pytest.raises(CheckpointError) as error:
        write_records(tmp_path, "file", chunks)
    assert str(error.value) == f"{tmp_path / 'file'}: cannot be written: [Errno 27] File too large"
    assert torch.serialization.get_crc32_options(), "as it was"


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none/file: cannot be written: \[Errno 2\] No such file or directory"):
        write_records(tmp_path / "none", "file", SHARES[0])


def test_what_reading_raises_is_raised(tmp_path: Path) -> None:
    def lost() -> Tensor:
        raise CheckpointError("it is lost")

    chunks = [*SHARES[0], Chunk("lost", (0,), (1,), (1,), torch.float32, lost)]
    with pytest.raises(CheckpointError, match=r"^it is lost$"):
        write_records(tmp_path, "file", chunks)


def test_the_bytes_are_those_of_the_save_with_collectives(tmp_path: Path) -> None:
    """Of one process: as tools.convert writes."""
    (tmp_path / "a").mkdir()
    chunks = [chunk for share in SHARES for chunk in share]
    save(tmp_path / "b", chunks, ["layer._extra_state"], None, lambda size: None)
    _, its = write_records(tmp_path / "a", "__0_0.distcp", chunks, ["layer._extra_state"])
    data = (tmp_path / "b" / "__0_0.distcp").read_bytes()
    assert its == FileSum(len(data), zlib.crc32(data))
    assert data == (tmp_path / "a" / "__0_0.distcp").read_bytes()
