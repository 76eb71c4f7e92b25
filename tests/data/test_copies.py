"""Data files that are compressed or lie elsewhere, and directories of several splits: the right rows, or a clear no."""

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.config.data import SourceConfig
from hybridflow.data.sources import data_files, fetch, open_files
from hybridflow.errors import DataError

KEY = "data.train"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, in which the copies lie, and an empty file system in memory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fsspec.filesystem("memory").store.clear()
    return tmp_path / "home" / ".cache" / "hybridflow" / "data"


def lines(*values: int) -> bytes:
    return "".join(json.dumps({"a": value}) + "\n" for value in values).encode()


def zstd(*frames: bytes) -> bytes:
    return b"".join(pyarrow.compress(frame, codec="zstd", asbytes=True) for frame in frames)


def put(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)


def read(named: Any, key: str = KEY) -> list[int]:
    fetch(named, key)
    files = open_files(named, key)
    return [row.fields["a"] for row in files.rows_at(range(len(files)))]


def refused(named: Any, key: str = KEY) -> str:
    with pytest.raises(DataError) as caught:
        read(named, key)
    return str(caught.value)


def test_a_compressed_file_is_expanded_once(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(1, 2)) + gzip.compress(lines(3)))  # two members, as `cat` makes of two files
    with pytest.raises(
        DataError, match=r"a\.jsonl\.gz: is compressed and has no local copy yet\. A start makes one in"
    ):
        open_files(str(path), KEY)
    assert read(str(path)) == [1, 2, 3]
    [copy] = data_files(str(path), KEY)
    assert copy.parent == cache and copy.name.startswith("a-") and copy.suffix == ".jsonl"
    before = copy.stat().st_mtime_ns
    assert read(str(path)) == [1, 2, 3] and copy.stat().st_mtime_ns == before
    path.write_bytes(gzip.compress(lines(4)))
    assert read(str(path)) == [4]
    copy.unlink()
    assert read(str(path)) == [4]


def test_zstandard_with_several_frames(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(lines(1, 2), lines(3)))
    assert read(str(tmp_path / "a.jsonl.zst")) == [1, 2, 3]


def test_directories_and_patterns_have_compressed_files_too(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(2)))
    (tmp_path / "a.jsonl").write_bytes(lines(1))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd(lines(3)))
    assert read(str(tmp_path)) == read(f"{tmp_path}/*.jsonl*") == [1, 2, 3]
    assert read((SourceConfig(path=f"{tmp_path}/[bc].*"), SourceConfig(path=f"{tmp_path}/a.jsonl"))) == [2, 3, 1]
    assert open_files(f"{tmp_path}/[bc].*", KEY).notes == (f"{KEY} = {tmp_path}/[bc].*: b.jsonl.gz, c.jsonl.zst",)
    assert refused(f"{tmp_path}/*.parquet") == f"{KEY} = {tmp_path}/*.parquet: is a pattern (glob) that no file matches"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl.gz", gzip.compress(lines(*range(999)))[:-30], "Compressed file ended before the end-of-stream"),
        ("a.jsonl.gz", b"no gzip", "Not a gzipped file"),
        ("a.jsonl.gz", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of git-lfs"),
        ("a.jsonl.zst", zstd(lines(*range(999)))[:-30], "Truncated compressed stream"),
        ("a.parquet.gz", gzip.compress(b"PAR1"), "of compressed files those of JSON lines are read"),
        ("a.zip", b"PK", "is compressed as zip, which is not read; expand the file, or compress it as .gz or .zst"),
    ],
    ids=[
        "cut gzip",
        "no gzip",
        "a pointer",
        "cut zstd",
        "compressed Parquet",
        "zip",
    ],  # bytes of gzip have the time in them
)
def test_a_file_that_cannot_be_expanded_is_named(name: str, content: bytes, why: str, tmp_path: Path, cache) -> None:
    (tmp_path / name).write_bytes(content)
    error = refused(str(tmp_path / name))
    assert name in error and why.lower() in error.lower()
    assert not cache.exists() or {file.suffix for file in cache.iterdir()} <= {".lock"}


def test_files_elsewhere(tmp_path: Path) -> None:
    put("memory://bucket/a.jsonl", lines(1, 2))
    put("memory://bucket/b.jsonl.gz", gzip.compress(lines(3)))
    pyarrow.parquet.write_table(pyarrow.table({"a": [4]}), tmp_path / "t.parquet")
    put("memory://bucket/c.parquet", (tmp_path / "t.parquet").read_bytes())
    with pytest.raises(DataError, match=r"data\.train = memory://bucket/a\.jsonl: lies elsewhere \(remote\)"):
        open_files("memory://bucket/a.jsonl", KEY)
    assert read("memory://bucket/a.jsonl") == [1, 2]
    assert read("memory://bucket/*.jsonl*") == [1, 2, 3]
    assert read("memory://bucket") == [1, 2, 3, 4]
    assert "FileNotFoundError" in refused("memory://bucket/d.jsonl")
    assert "is a pattern (glob) that no file matches" in refused("memory://bucket/*.csv")
    put("memory://bucket/a.jsonl", lines(7))
    assert read("memory://bucket/a.jsonl") == [7], "what has changed there is copied anew"


def test_without_network_the_earlier_copies_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    put("memory://bucket/a.jsonl", lines(1, 2))
    assert read("memory://bucket/a.jsonl") == [1, 2]

    def unreachable(*arguments: Any, **how: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", unreachable)
    assert read("memory://bucket/a.jsonl") == [1, 2]
    assert (
        refused("memory://bucket/b.jsonl")
        == f"{KEY} = memory://bucket/b.jsonl: cannot be read: ConnectionError: no route"
    )


def test_a_package_that_is_missing_and_a_url_of_nobody() -> None:
    with pytest.raises(ImportError):
        fsspec.filesystem("s3")
    assert "reading there needs a package: Install s3fs" in refused("s3://bucket/a.jsonl")
    assert "is no URL that fsspec reads: Protocol not known" in refused("nobody://bucket/a.jsonl")


def test_of_several_splits_in_a_directory_the_one_that_the_key_means_is_taken(tmp_path: Path) -> None:
    """By the words of file names that `datasets` makes splits of."""
    for name, values in (("train-00000-of-00002", 1), ("train-00001-of-00002", 2), ("test-00000-of-00001", 3)):
        pyarrow.parquet.write_table(pyarrow.table({"a": [values]}), tmp_path / f"{name}.parquet")
    assert (read(str(tmp_path)), read(str(tmp_path), "data.heldout")) == ([1, 2], [3])
    [note] = open_files(str(tmp_path), KEY).notes
    assert note == (
        f"data.train = {tmp_path}: takes the split train: train-00000-of-00002.parquet, train-00001-of-00002.parquet; "
        "not test-00000-of-00001.parquet"
    )
    pyarrow.parquet.write_table(pyarrow.table({"a": [4]}), tmp_path / "validation.parquet")
    assert read(str(tmp_path)) == [1, 2]
    assert refused(str(tmp_path), "data.heldout") == (
        f"data.heldout = {tmp_path}: holds the splits test, train, validation by the names of its files. Name the "
        f"files of one, such as {tmp_path}/test-*.parquet"
    )
    assert read(f"{tmp_path}/test-*.parquet", "data.heldout") == [3]


def test_names_without_a_split_are_one_data_set(tmp_path: Path) -> None:
    for name, value in (("math", 1), ("latest", 2), ("trainer", 3)):  # no word of theirs is a split's
        (tmp_path / f"{name}.jsonl").write_bytes(lines(value))
    assert read(str(tmp_path)) == [2, 1, 3] and open_files(str(tmp_path), KEY).notes == ()
    (tmp_path / "test.jsonl").write_bytes(lines(4))
    assert read(str(tmp_path)) == [2, 1, 4, 3], "one split is no choice"
