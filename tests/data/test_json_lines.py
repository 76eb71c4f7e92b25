"""Lines of a file, found by their ends: whatever these are, wherever a block ends, and what is no row."""

import json
import random
from pathlib import Path

import pytest

from hybridflow.data import files, json_rows
from hybridflow.data.files import content_digest
from hybridflow.data.json_rows import JsonRows
from tests.data.held import held_bytes


def written(path: Path, text: bytes) -> JsonRows:
    path.write_bytes(text)
    return JsonRows(path)


def fields(file: JsonRows) -> list:
    return [row.fields for row in file.rows_at(range(len(file)))]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("last", [b"", b"end"])
def test_rows_are_found_wherever_blocks_end(tmp_path, monkeypatch, block, end, last) -> None:
    monkeypatch.setattr(json_rows, "BLOCK", block)
    lines = [b'{"a": 1}', b"", b' {"a": 2}', b"\t ", b"", b'{"a": 3}']
    file = written(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + end.join(lines) + (end if last else b""))
    assert fields(file) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [row.where for row in file.rows_at([2, 0, 2])] == [f"{file.path}, line {n}" for n in (6, 1, 6)]


@pytest.mark.parametrize("seed", range(5))
def test_lines_are_those_that_splitlines_finds(tmp_path, monkeypatch, seed) -> None:
    """bytes.splitlines ends lines at the same three."""
    monkeypatch.setattr(json_rows, "BLOCK", 16)
    random.seed(seed)
    text = b"".join(random.choice([b'{"a": 1}', b"\n", b"\r", b"\r\n", b" ", b"x"]) for _ in range(300))
    file = written(tmp_path / "a.jsonl", text)
    lines = [i for i, line in enumerate(text.splitlines(), start=1) if line.strip()]
    assert [row.where for row in file.rows_at(range(len(file)))] == [f"{file.path}, line {i}" for i in lines]


def test_an_empty_file_has_no_rows(tmp_path) -> None:
    assert [len(written(tmp_path / "a.jsonl", text)) for text in (b"", b"\n", b" \r\n\r", b"{}")] == [0, 0, 0, 1]


def test_a_blank_line_of_unicode_spaces_is_blank(tmp_path) -> None:
    assert fields(written(tmp_path / "a.jsonl", '{"a": 1}\n\u2003\u00a0\n{"a": 2}'.encode())) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("line", "message", "reason"),
    [
        (b'{"a": "\xff"}', "is not UTF-8 text (invalid start byte); data files are JSON lines or Parquet", "not UTF-8"),
        (b'{"a": ', "is not JSON: Expecting value at column 7", "not JSON"),
        (b"[1]", "is a JSON list, expected an object of named fields", "no object"),
        (b"7" * 5000, "is JSON that cannot be read: Exceeds the limit", "not JSON"),
        (b"[" * 100_000, "is JSON that cannot be read: ", "not JSON"),
    ],
)
def test_what_is_no_row_says_so_when_it_is_read(tmp_path, line, message, reason) -> None:
    file = written(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    first, wrong, last = file.rows_at([0, 1, 2])
    assert (first.problem, last.problem, wrong.fields) == (None, None, {})
    assert str(wrong.problem).startswith(f"{file.path}, line 2: {message}")
    assert wrong.problem.reason == reason


def test_a_line_costs_eight_bytes(tmp_path) -> None:
    assert 8 * 10_000 <= held_bytes(lambda: written(tmp_path / "a.jsonl", b"{}\n" * 10_000)) < 9 * 10_000


def test_of_a_large_file_the_digest_is_of_its_size_and_of_blocks(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.jsonl"

    def digest(text: bytes) -> bytes:
        path.write_bytes(text)
        with path.open("rb") as file:
            return content_digest(file, len(text))

    whole = json.dumps({"a": list(range(2000))}).encode()
    of_all = digest(whole)
    monkeypatch.setattr(files, "MOST_DIGESTED", 100)
    monkeypatch.setattr(files, "BLOCK", 40)  # blocks of 10
    sampled = digest(whole)
    assert sampled != of_all
    assert sampled == digest(whole)
    assert sampled != digest(whole + b" ")
    assert sampled != digest(whole[:-1] + b" ")
    assert sampled != digest(b" " + whole[1:])
    assert sampled == digest(whole[:20] + b"?" + whole[21:])  # between two blocks
