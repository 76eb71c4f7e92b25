"""Arrow files, and directories that `datasets.save_to_disk` writes: in the order they say, split by split."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from hybridflow.data.arrow import Arrow
from hybridflow.data.sources import open_files
from hybridflow.errors import DataError
from tests.messages import like

ROWS = [{"messages": [{"role": "user", "content": f"why {i}?"}], "note": None if i % 2 else "even"} for i in range(10)]
SCHEMA = pyarrow.Table.from_pylist(ROWS).schema


def write(path: Path, rows: list[dict[str, Any]] = ROWS, *, batch: int = 4, footer: bool = False) -> Path:
    table = pyarrow.Table.from_pylist(rows, schema=SCHEMA)
    new = pyarrow.ipc.new_file if footer else pyarrow.ipc.new_stream
    with new(str(path), SCHEMA) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def save(directory: Path, parts: dict[str, list[dict[str, Any]]], **state: Any) -> Path:
    """As datasets writes it; the order of the files is that of state.json."""
    directory.mkdir()
    for name, rows in parts.items():
        write(directory / name, rows)
    (directory / "dataset_info.json").write_text('{"features": {}}')
    listed = {"_data_files": [{"filename": name} for name in parts], "_split": "train"}
    (directory / "state.json").write_text(json.dumps(listed | state))
    return directory


@pytest.mark.parametrize("footer", [False, True])
def test_rows_are_python_values_in_any_order(tmp_path, footer) -> None:
    file = Arrow(write(tmp_path / "a.arrow", footer=footer))
    rows = file.rows_at([9, 0, 4, 0])
    assert [row.fields for row in rows] == [ROWS[9], ROWS[0], ROWS[4], ROWS[0]]
    assert [row.where for row in rows] == [f"{file.path}, row {n}" for n in (10, 1, 5, 1)]
    assert (len(file), file.rows_at([]), file.nbytes) == (10, [], 4 * 8)
    assert file.num_bytes == file.path.stat().st_size


def test_a_file_that_is_mapped_costs_no_memory_of_its_own(tmp_path) -> None:
    path = write(tmp_path / "a.arrow", [{"messages": [], "note": "x" * 1000}] * 2000)
    before = pyarrow.total_allocated_bytes()
    file = Arrow(path)
    file.rows_at([0, 1999])
    assert pyarrow.total_allocated_bytes() - before < path.stat().st_size / 10


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"no stream of batches at all", None])
def test_a_damaged_file_is_refused(tmp_path, content) -> None:
    path = write(tmp_path / "a.arrow")
    path.write_bytes(path.read_bytes()[:-300] if content is None else content)
    with pytest.raises(DataError) as raised:
        Arrow(path)
    assert str(raised.value).startswith(f"{path}: is no Arrow file, or not a whole one: ")


def test_a_file_that_has_changed_is_refused(tmp_path) -> None:
    file = Arrow(write(tmp_path / "a.arrow"))
    write(tmp_path / "a.arrow", ROWS[:5])
    with pytest.raises(DataError, match="has changed since the run began"):
        file.rows_at([0])


# ----------------------------------------------------------------------------------------------- saved data sets


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
