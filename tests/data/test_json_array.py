"""A file that is one array: where its rows lie, whatever stands in their strings, and what is no array of rows."""

import json
import random
from pathlib import Path

import pytest

from hybridflow.data.json_rows import JsonRows, begins_as_array
from hybridflow.errors import DataError
from tests.data.held import held_bytes

ROWS = [
    {"a": 1},
    {"a": "} ] , { [", "b": 'quoted " and \\ and \\" {'},
    {"a": {"b": [{"c": "\u00e9\n"}, []]}, "d": None},
    {},
]


def written(path: Path, text: str | bytes) -> JsonRows:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return JsonRows(path)


def refusal(path: Path, text: str) -> str:
    with pytest.raises(DataError) as raised:
        written(path, text)
    message = str(raised.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("ascii_alone", [True, False])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b" \r\n\t"])
def test_rows_are_those_that_json_finds(tmp_path, indent, ascii_alone, before) -> None:
    text = before + json.dumps(ROWS, indent=indent, ensure_ascii=ascii_alone).encode() + b"\n"
    file = written(tmp_path / "a.json", text)
    assert begins_as_array(file.path)
    rows = file.rows_at([3, 0, 1, 2, 0])
    assert [row.fields for row in rows] == [ROWS[i] for i in (3, 0, 1, 2, 0)]
    assert rows[0].where == f"{file.path}, row 4"
    assert (len(file), file.num_bytes) == (4, len(text))


@pytest.mark.parametrize("seed", range(5))
def test_strings_of_anything(tmp_path, seed) -> None:
    random.seed(seed)
    rows = [{"".join(random.choices('ab"\\{}[],:\n', k=5)): random.choices('"\\{}', k=3)} for _ in range(50)]
    file = written(tmp_path / "a.json", json.dumps(rows))
    assert [row.fields for row in file.rows_at(range(50))] == rows


def test_a_row_costs_16_bytes(tmp_path) -> None:
    assert 16 * 10_000 <= held_bytes(lambda: written(tmp_path / "a.json", json.dumps([{}] * 10_000))) < 17 * 10_000


def test_what_is_no_array(tmp_path) -> None:
    assert not begins_as_array(tmp_path / "absent") and not begins_as_array(tmp_path)
    for text in ("", '{"a": [1]}', "x"):
        (tmp_path / "a.json").write_text(text)
        assert not begins_as_array(tmp_path / "a.json")


def test_an_empty_array_has_no_rows(tmp_path) -> None:
    assert [len(written(tmp_path / "a.json", text)) for text in ("[]", " [ ] \n")] == [0, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", ": is no JSON array of objects: byte 1 is '1, 2]', expected an object"),
        ('[{"a": 1}, ]', ": is no JSON array of objects: byte 11 is ']', expected an object"),
        ('[{"a": 1} {"a": 2}]', ": is no JSON array of objects: byte 10 is '{\"a\": 2}]', expected a comma"),
        ('[{"a": 1}', ": is no JSON array of objects: byte 9 is the end of the file, expected a comma"),
        ('[{"a": 1}]\n[{"a": 2}]', ": is no JSON array of objects: byte 11 is '[{\"a\": 2}]', expected nothing"),
        ('[{"a": 1}, {"a": "}', ", row 2: is cut short: nothing ends what begins at byte 11"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, message) -> None:
    assert refusal(tmp_path / "a.json", text).startswith(message)


def test_a_wrong_row_costs_itself(tmp_path) -> None:
    file = written(tmp_path / "a.json", '[{"a": 1},\n {"a":\n oh}, {"a": 3}]')
    first, wrong, last = file.rows_at(range(3))
    assert (first.fields, last.fields) == ({"a": 1}, {"a": 3})
    assert str(wrong.problem) == f"{file.path}, row 2: is not JSON: Expecting value at line 2 of it, column 2"


def test_a_file_that_has_changed_is_refused(tmp_path) -> None:
    file = written(tmp_path / "a.json", "[{}]")
    file.path.write_text("[{}, {}]")
    with pytest.raises(DataError, match="has changed since the run began"):
        file.rows_at([0])
