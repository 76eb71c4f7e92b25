"""Parquet and Arrow files: rows by group, what nested values become, and files that are damaged.

Also directories that `datasets.save_to_disk` writes: in the order they say, split by split.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.data import columnar
from hybridflow.data.columnar import Columnar
from hybridflow.data.sources import open_files
from hybridflow.errors import DataError
from tests.messages import like

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"why {i}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "score": i / 2,
        "ids": [i, i + 1],
        "note": None if i % 2 else "even",
    }
    for i in range(10)
]
SCHEMA = pyarrow.Table.from_pylist(ROWS).schema


def write(path: Path, rows: list[dict[str, Any]] = ROWS, *, footer: bool = False) -> Path:
    """In groups of 4 rows. footer: of Arrow's two formats that with one."""
    table = pyarrow.Table.from_pylist(rows, schema=SCHEMA)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=4)
        return path
    new = pyarrow.ipc.new_file if footer else pyarrow.ipc.new_stream
    with new(str(path), SCHEMA) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


@pytest.mark.parametrize(("name", "footer"), [("a.parquet", True), ("a.arrow", True), ("a.arrow", False)])
def test_rows_are_python_values_in_any_order(tmp_path, name, footer) -> None:
    file = Columnar(write(tmp_path / name, footer=footer))
    rows = file.rows_at([9, 0, 4, 0])
    assert [row.fields for row in rows] == [ROWS[9], ROWS[0], ROWS[4], ROWS[0]]
    assert [row.where for row in rows] == [f"{file.path}, row {n}" for n in (10, 1, 5, 1)]
    assert (len(file), file.rows_at([])) == (10, [])
    assert file.num_bytes == file.path.stat().st_size


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_file_that_has_changed_is_refused(tmp_path, name) -> None:
    file = Columnar(write(tmp_path / name))
    write(tmp_path / name, ROWS[:5])
    with pytest.raises(DataError, match="has changed since the run began"):
        file.rows_at([0])


def test_groups_are_kept_up_to_a_limit(tmp_path, monkeypatch) -> None:
    file = Columnar(write(tmp_path / "a.parquet"))
    read: list[int] = []
    original = pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "read_row_group", lambda self, i: read.append(i) or original(self, i)
    )
    file.rows_at([0, 9, 1])
    file.rows_at([2, 8])
    assert read == [0, 2]
    monkeypatch.setattr(columnar, "MOST_KEPT", 1)
    for number in (4, 5, 0, 1):
        file.rows_at([number])
    assert read == [0, 2, 1, 0]


@pytest.mark.parametrize("cut", [0, 3, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, cut) -> None:
    path = write(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError) as raised:
        Columnar(path)
    assert str(raised.value).startswith(f"{path}: is no Parquet file, or not a whole one: ")


def test_a_damaged_group_costs_its_rows(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"prompt": [f"why {i}?" * 50 for i in range(8)]})
    pyarrow.parquet.write_table(table, path, row_group_size=4, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56  # the first page's header
    path.write_bytes(content)
    rows = Columnar(path).rows_at(range(8))
    assert [row.problem is None for row in rows] == [False] * 4 + [True] * 4
    assert str(rows[2].problem).startswith(f"{path}, row 3: its row group 0 cannot be read: ")


def test_a_text_that_is_not_utf8_costs_its_row(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    offsets, text = pyarrow.array([0, 1, 2, 3], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xffb")
    wrong = pyarrow.StringArray.from_buffers(3, offsets, text)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": wrong}), path)
    rows = Columnar(path).rows_at(range(3))
    assert [row.fields for row in rows] == [{"prompt": "a"}, {}, {"prompt": "b"}]
    assert str(rows[1].problem) == f"{path}, row 2: is not UTF-8 text (invalid start byte)"


def test_a_file_that_is_mapped_costs_no_memory_of_its_own(tmp_path) -> None:
    path = write(tmp_path / "a.arrow", [{"note": "x" * 1000}] * 2000)
    before = pyarrow.total_allocated_bytes()
    file = Columnar(path)
    file.rows_at([0, 1999])
    assert pyarrow.total_allocated_bytes() - before < path.stat().st_size / 10


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"no stream of batches at all", None])
def test_a_damaged_file_is_refused(tmp_path, content) -> None:
    path = write(tmp_path / "a.arrow")
    path.write_bytes(path.read_bytes()[:-300] if content is None else content)
    with pytest.raises(DataError) as raised:
        Columnar(path)
    assert str(raised.value).startswith(f"{path}: is no Arrow file, or not a whole one: ")


# ----------------------------------------------------------------------------------------------- saved data sets


def save(directory: Path, parts: dict[str, list[dict[str, Any]]], **state: Any) -> Path:
    """As datasets writes it; the order of the files is that of state.json."""
    directory.mkdir()
    for name, rows in parts.items():
        write(directory / name, rows)
    (directory / "dataset_info.json").write_text('{"features": {}}')
    listed = {"_data_files": [{"filename": name} for name in parts], "_split": "train"}
    (directory / "state.json").write_text(json.dumps(listed | state))
    return directory


def fields(path: Path) -> list[dict[str, Any]]:
    files = open_files(str(path), "data.train")
    return [row.fields for row in files.rows_at(range(len(files)))]


def test_a_saved_data_set_is_read_in_the_order_that_it_says(tmp_path) -> None:
    parts = {"data-00001-of-00002.arrow": ROWS[:3], "data-00000-of-00002.arrow": ROWS[3:]}
    assert fields(save(tmp_path / "saved", parts)) == ROWS
    assert fields(save(tmp_path / "unsaid", dict(sorted(parts.items())), _data_files=None)) == ROWS[3:] + ROWS[:3]


def test_a_directory_of_arrow_files_is_read_by_their_names(tmp_path) -> None:
    write(tmp_path / "b.arrow", ROWS[5:])
    write(tmp_path / "a.arrow", ROWS[:5])
    assert fields(tmp_path) == ROWS


def test_several_splits_are_refused_with_their_paths(tmp_path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        save(tmp_path / split, {"data-00000-of-00001.arrow": ROWS})
    with pytest.raises(DataError) as raised:
        open_files(str(tmp_path), "data.heldout")
    assert str(raised.value) == like(
        f"data.heldout = {tmp_path}: holds several splits (dataset_dict.json): {tmp_path}/train, {tmp_path}/test"
    )
    assert fields(tmp_path / "train") == ROWS


def test_rows_that_an_index_chooses_are_refused(tmp_path) -> None:
    indices = [{"filename": "indices.arrow"}]
    path = save(tmp_path / "saved", {"data.arrow": ROWS}, _indices_data_files=indices)
    with pytest.raises(DataError) as raised:
        open_files(str(path), "data.train")
    assert str(raised.value) == like(
        f"{path / 'state.json'}: its rows are chosen by an index (_indices_data_files); dataset.flatten_indices()"
    )


@pytest.mark.parametrize("state", ["{", "[]"])
def test_a_damaged_description_is_named(tmp_path, state) -> None:
    path = save(tmp_path / "saved", {"data.arrow": ROWS})
    (path / "state.json").write_text(state)
    with pytest.raises(DataError, match=f"^{path / 'state.json'}: "):
        open_files(str(path), "data.train")
