"""Parquet files: rows by group, what nested values become, and files that are damaged."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.data import parquet
from hybridflow.data.parquet import Parquet
from hybridflow.errors import DataError

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


def write(path: Path, rows: list = ROWS, *, group: int = 4) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def test_rows_are_python_values_in_any_order(tmp_path) -> None:
    file = Parquet(write(tmp_path / "a.parquet"))
    rows = file.rows_at([9, 0, 4, 0])
    assert [row.fields for row in rows] == [ROWS[9], ROWS[0], ROWS[4], ROWS[0]]
    assert [row.where for row in rows] == [f"{file.path}, row {n}" for n in (10, 1, 5, 1)]
    assert len(file) == 10 and file.rows_at([]) == []


def test_groups_are_kept_up_to_a_limit(tmp_path, monkeypatch) -> None:
    file = Parquet(write(tmp_path / "a.parquet"))
    read: list[int] = []
    original = pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "read_row_group", lambda self, i: read.append(i) or original(self, i)
    )
    file.rows_at([0, 9, 1])
    file.rows_at([2, 8])
    assert read == [0, 2]
    monkeypatch.setattr(parquet, "MOST_KEPT", 1)
    for number in (4, 5, 0, 1):
        file.rows_at([number])
    assert read == [0, 2, 1, 0]


@pytest.mark.parametrize("cut", [0, 3, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, cut) -> None:
    path = write(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError) as raised:
        Parquet(path)
    assert str(raised.value).startswith(f"{path}: is no Parquet file, or not a whole one: ")


def test_a_damaged_group_costs_its_rows(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"prompt": [f"why {i}?" * 50 for i in range(8)]})
    pyarrow.parquet.write_table(table, path, row_group_size=4, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56  # the first page's header
    path.write_bytes(content)
    rows = Parquet(path).rows_at(range(8))
    assert [row.problem is None for row in rows] == [False] * 4 + [True] * 4
    assert str(rows[2].problem).startswith(f"{path}, row 3: its row group 0 cannot be read: ")


def test_a_text_that_is_not_utf8_costs_its_row(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    offsets, text = pyarrow.array([0, 1, 2, 3], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xffb")
    wrong = pyarrow.StringArray.from_buffers(3, offsets, text)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": wrong}), path)
    rows = Parquet(path).rows_at(range(3))
    assert [row.fields for row in rows] == [{"prompt": "a"}, {}, {"prompt": "b"}]
    assert str(rows[1].problem) == f"{path}, row 2: is not UTF-8 text (invalid start byte)"


def test_a_file_that_has_changed_is_refused(tmp_path) -> None:
    file = Parquet(write(tmp_path / "a.parquet"))
    write(tmp_path / "a.parquet", ROWS[:5])
    with pytest.raises(DataError, match="has changed since the run began"):
        file.rows_at([0])
