"""Files, directories and several of them as one list of rows."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.config.data import SourceConfig
from hybridflow.data.sources import Files, open_files
from hybridflow.errors import DataError
from tests.messages import like


def lines(path: Path, *values: int) -> Path:
    path.write_text("".join(json.dumps({"a": value}) + "\n" for value in values))
    return path


def table(path: Path, *values: int) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"a": values}), path)
    return path


def values(files: Files) -> list[int]:
    return [row.fields["a"] for row in files.rows_at(range(len(files)))]


def test_a_directory_is_its_data_files_by_name(tmp_path) -> None:
    lines(tmp_path / "b.jsonl", 3, 4)
    table(tmp_path / "a.parquet", 1, 2)
    lines(tmp_path / "c.json", 5)
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / "d.jsonl").mkdir()
    files = open_files(str(tmp_path), "data.train")
    assert values(files) == [1, 2, 3, 4, 5]
    found = [(row.fields["a"], row.where.removeprefix(f"{tmp_path}/")) for row in files.rows_at([4, 0, 3, 4])]
    assert found == [(5, "c.json, line 1"), (1, "a.parquet, row 1"), (4, "b.jsonl, line 2"), (5, "c.json, line 1")]
    assert files.num_bytes == sum((tmp_path / name).stat().st_size for name in ("a.parquet", "b.jsonl", "c.json"))


def test_a_parquet_file_is_known_by_its_content_too(tmp_path) -> None:
    assert values(open_files(table(tmp_path / "data", 7, 8), "data.train")) == [7, 8]


def test_several_sources(tmp_path) -> None:
    given = (
        SourceConfig(path=str(lines(tmp_path / "a.jsonl", 1, 2)), weight=1),
        SourceConfig(path=str(table(tmp_path / "b.parquet", 3)), weight=2.5),
    )
    files = open_files(given, "data.train")
    assert (values(files), files.ends, files.weights) == ([1, 2, 3], (2, 3), (1.0, 2.5))
    assert open_files(tuple(SourceConfig(path=source.path) for source in given), "data.train").weights is None


def test_a_weight_that_never_has_a_turn_is_refused(tmp_path) -> None:
    path = str(lines(tmp_path / "a.jsonl", 1))
    with pytest.raises(DataError) as raised:
        open_files((SourceConfig(path=path, weight=1e-6), SourceConfig(path=path, weight=1)), "data.train")
    assert str(raised.value) == (
        like(
            f"data.train: the weight 1e-06 of {path} is less than one row in 1,000. Leave the file out, or "
            "give a larger weight"
        )
    )


def test_the_digest_is_of_the_contents_in_their_order(tmp_path) -> None:
    one, other = lines(tmp_path / "a.jsonl", 1, 2), lines(tmp_path / "b.jsonl", 3)
    same = lines(tmp_path / "c.jsonl", 1, 2)

    def digest(*paths: Path) -> bytes:
        return open_files(tuple(SourceConfig(path=str(path)) for path in paths), "data.train").digest

    assert digest(one) == digest(same) == open_files(one, "data.train").digest
    assert digest(one, other) == digest(same, other) != digest(other, one)
    assert len({digest(one), digest(one, other), digest(one, one)}) == 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_a_pointer_of_git_lfs_is_called_so(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3554214752\n")
    with pytest.raises(DataError, match=f"{name}: is a pointer of git-lfs"):
        open_files(str(tmp_path / name), "data.train")


def test_what_holds_nothing_is_refused(tmp_path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in (
        (
            empty,
            "is a directory without .jsonl, .json, .ndjson, .parquet or .arrow files, compressed or not; the directory "
            "holds nothing",
        ),
        (
            lines(tmp_path / "a.jsonl"),
            "holds no row (data.heldout); expected JSON (lines or an array), Parquet or Arrow",
        ),
        (tmp_path / "absent", "cannot be read: no such local file"),
    ):
        with pytest.raises(DataError) as raised:
            open_files(str(path), "data.heldout")
        assert str(raised.value) == f"{path}: {message}"


def test_an_array_is_read_where_the_file_is_called_json(tmp_path) -> None:
    text = json.dumps([{"a": 1}, {"a": 2}], indent=2)
    (tmp_path / "a.json").write_text("\n" + text)
    assert values(open_files(tmp_path / "a.json", "data.train")) == [1, 2]
    (tmp_path / "b.jsonl").write_text(text)
    first = open_files(tmp_path / "b.jsonl", "data.train").rows_at([0])[0]
    assert "one JSON array is read where it is called .json" in str(first.problem)


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
@pytest.mark.parametrize("directory", [False, True])
def test_text_tables_are_refused_with_lines_that_make_parquet(tmp_path, suffix, delimiter, directory) -> None:
    path = tmp_path / f"data{suffix}"
    path.write_text(f'question{delimiter}a\n"why\nso?"{delimiter}7\n')
    with pytest.raises(DataError) as raised:
        open_files(str(tmp_path if directory else path), "data.train")
    said, *code = str(raised.value).splitlines()
    assert path.name in said if directory else said.startswith(f"{path}: ")
    exec("\n".join(line.strip() for line in code))
    [row] = open_files(path.with_suffix(".parquet"), "data.train").rows_at([0])
    assert row.fields == {"question": "why\nso?", "a": 7}
