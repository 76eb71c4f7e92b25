"""Rows that are checked at the start or when their turn comes, and what is left out where the rules say so."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.data import DataFiles, SourceConfig
from hybridflow.data.order import PromptOrder
from hybridflow.data.prompts import PromptDataset, load_prompts
from hybridflow.data.row_notes import left_out_lines
from hybridflow.data.sources import open_files
from hybridflow.errors import DataError
from tests.data.held import held_bytes
from tests.data.test_prompts import WORDS, word_tokenizer
from tests.messages import like

NUM_ROWS = 12
LONG, BROKEN = (3, 7), (5, 10)  # rows that are too long; that are none


def write(path: Path, *, long: tuple = LONG, broken: tuple = BROKEN) -> Path:
    rows = [{"prompt": "why why why" if i in long else "why", "row": i} for i in range(NUM_ROWS)]
    path.write_text("".join("{\n" if i in broken else f"{json.dumps(row)}\n" for i, row in enumerate(rows)))
    return path


def load(path: DataFiles | Path, *, checked: int, **changes: Any) -> PromptDataset:
    options = {"prompt_key": "prompt", "chat_template": False, "max_length": 2, "vocab_size": len(WORDS)}
    options |= {"overlong": "drop", "bad_rows": "drop"}
    return load_prompts(path, word_tokenizer(), checked_bytes=checked, **(options | changes))


def draw(dataset: PromptDataset, counts: list[int], *, seed: int = 0, shuffle: bool = True, position: int = 0) -> Any:
    """The `row` of each prompt drawn, the place reached, and what was passed over."""
    order = dataset.order(seed, shuffle, position=position)
    drawn = [dataset.draw(order, count) for count in counts]
    for its in drawn:
        assert dataset.batch(its.numbers).columns == its.batch.columns
    passed = [its.dropped for its in drawn]
    return [row for its in drawn for row in its.batch.columns["row"]], order.position, passed


def test_what_is_wrong_is_left_out_at_the_start(tmp_path) -> None:
    dataset = load(write(tmp_path / "a.jsonl"), checked=1 << 20)
    assert (len(dataset), dataset.dropped.num_rows, dataset.rows.is_checked) == (8, 4, True)
    assert dataset.dropped.counts == {"too long": 2, "not JSON": 2}
    assert draw(dataset, [8], shuffle=False)[:2] == ([0, 1, 2, 4, 6, 8, 9, 11], 8)
    kept = [0, 1, 2, 4, 6, 8, 9, 11]
    assert draw(dataset, [16])[0] == [kept[i] for i in PromptOrder(8, 0, True).next(16)]


def test_what_is_wrong_is_passed_over_when_its_turn_comes(tmp_path) -> None:
    dataset = load(write(tmp_path / "a.jsonl"), checked=0)
    assert (len(dataset), dataset.dropped.num_rows, dataset.rows.is_checked) == (NUM_ROWS, 0, False)
    rows, position, passed = draw(dataset, [3, 3, 4], shuffle=False)
    assert (rows, position) == ([0, 1, 2, 4, 6, 8, 9, 11, 0, 1], 14)
    assert [its.counts for its in passed] == [{}, {"too long": 2, "not JSON": 1}, {"not JSON": 1}]
    wrong = {*LONG, *BROKEN}
    assert draw(dataset, [16])[0] == [i for i in PromptOrder(NUM_ROWS, 0, True).next(24) if i not in wrong]


def test_where_nothing_is_wrong_both_ways_draw_the_same(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", long=(), broken=())
    early, late = (draw(load(path, checked=checked), [5, 9, 20], seed=3)[:2] for checked in (1 << 20, 0))
    assert early == late


@pytest.mark.parametrize("checked", [0, 1 << 20])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_goes_on_exactly_from_any_place(tmp_path, checked, shuffle) -> None:
    dataset = load(write(tmp_path / "a.jsonl"), checked=checked)
    rows, _, _ = draw(dataset, [4] * 6, shuffle=shuffle)
    for done in range(6):
        _, position, _ = draw(dataset, [4] * done, shuffle=shuffle)
        assert draw(dataset, [4] * (6 - done), shuffle=shuffle, position=position)[0] == rows[4 * done :]


def test_a_row_that_must_not_be_wrong_ends_the_run_when_its_turn_comes(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl")
    dataset = load(path, checked=0, bad_rows="error")
    order = dataset.order(0, False)
    assert dataset.draw(order, 4).numbers == (0, 1, 2, 4)
    with pytest.raises(DataError, match=r"a.jsonl, line 6: is not JSON"):
        dataset.draw(order, 1)
    with pytest.raises(DataError, match=r"a.jsonl, line 4: the prompt has 3 tokens"):
        draw(load(path, checked=0, overlong="error"), [4], shuffle=False)
    for changes, line in (({"bad_rows": "error"}, 6), ({"overlong": "error"}, 4)):
        with pytest.raises(DataError, match=f"a.jsonl, line {line}: "):
            load(path, checked=1 << 20, **changes)


@pytest.mark.parametrize("checked", [0, 1 << 20])
def test_where_nothing_is_left_a_run_ends(tmp_path, checked) -> None:
    everything = tuple(range(NUM_ROWS))
    with pytest.raises(DataError, match=r"line 1: is not JSON"):
        load(write(tmp_path / "a.jsonl", broken=everything), checked=checked)
    with pytest.raises(
        DataError, match=r"no prompt is left: all 12 are longer|no row can be used: .*line 1: the prompt"
    ):
        load(write(tmp_path / "a.jsonl", long=everything, broken=()), checked=checked)


@pytest.mark.parametrize("checked", [0, 1 << 20])
def test_other_columns_are_a_wrong_row(tmp_path, checked) -> None:
    path = write(tmp_path / "a.jsonl", broken=())
    path.write_text(path.read_text() + '{"prompt": "why", "line": 3}\n')
    with pytest.raises(DataError, match=r"line 13: has no key 'row', which .*line 1 has"):
        draw(load(path, checked=checked, bad_rows="error"), [11], shuffle=False)
    dataset = load(path, checked=checked)
    assert draw(dataset, [11], shuffle=False)[0] == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11, 0]


@pytest.mark.parametrize("checked", [0, 1 << 20])
def test_sources_with_weights_lose_rows_each_for_itself(tmp_path, checked) -> None:
    first, other = write(tmp_path / "a.jsonl", long=(0, 1, 2)), write(tmp_path / "b.jsonl", broken=(0,))
    sources = (SourceConfig(path=str(first), weight=1), SourceConfig(path=str(other), weight=1))
    dataset = load(sources, checked=checked)
    rows = draw(dataset, [8], shuffle=False)[0]
    mine, others = [3, 4, 6, 7, 8, 9, 11], [1, 2, 4, 5, 6, 8]
    if checked:
        assert rows == [3, 1, 4, 2, 6, 4, 7, 5]
    else:  # the turns count rows that are passed over
        assert rows == [1, 2, 3, 4, 4, 5, 6, 6]
    assert set(rows) <= {*mine, *others}


def test_a_source_of_which_nothing_is_left_is_refused(tmp_path) -> None:
    first = write(tmp_path / "a.jsonl", broken=tuple(range(NUM_ROWS)))
    other = write(tmp_path / "b.jsonl")
    sources = (SourceConfig(path=str(other), weight=1), SourceConfig(path=str(first), weight=1))
    dataset = load(sources, checked=1 << 20)
    with pytest.raises(DataError, match=r"a.jsonl: no row is left of this file: "):
        dataset.order(0, True)


def test_what_is_printed_once(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl")
    assert left_out_lines("data.train", load(path, checked=1 << 20).rows, "prompts longer than a limit") == [
        "data.train: left out 2 of 12 prompts longer than a limit",
        like(
            "data.train: left out 2 of 12 rows that cannot be used: 2 not JSON (first: "
            f"{path}, line 6: is not JSON: Expecting property name enclosed in double quotes at column 2)"
        ),
    ]
    assert left_out_lines("data.train", load(path, checked=1).rows, "prompts longer than a limit") == [
        like("data.train: 0.00 GB are more than data.checked_mib. Each of the 12 rows is checked on use")
    ]
    # of an environment, whatever the size: a row is begun when it is drawn
    assert left_out_lines("data.train", load(path, checked=0).rows, "prompts longer than a limit") == [
        "data.train: each of the 12 rows is checked on use"
    ]
    clean = write(tmp_path / "b.jsonl", long=(), broken=())
    assert left_out_lines("data.train", load(clean, checked=1 << 20).rows, "too long") == []


def test_a_large_file_is_there_at_once_and_costs_a_number_a_row(tmp_path) -> None:
    """A million rows: seconds, eight bytes each, and the last one is read alone."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "why", "row": 0}\n' * 999_999 + b'{"prompt": "what is", "row": 1}\n')
    assert 8_000_000 <= held_bytes(lambda: load(path, checked=1 << 20)) < 8_200_000
    assert load(path, checked=1 << 20).batch([999_999]).columns == {"row": (1,)}
    assert open_files(path, "data.train").num_bytes == path.stat().st_size


def test_the_first_rows_are_looked_at_once_and_nothing_else(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that the rules leave nothing of, too: a run says that as it checks or draws."""
    rows = load(write(tmp_path / "a.jsonl", long=range(NUM_ROWS)), checked=0, draws=False).rows
    encoded: list[int] = []
    encode = rows._encode
    monkeypatch.setattr(rows, "_encode", lambda given: (encoded.append(len(given)), encode(given))[1])
    assert (rows.look_at_first(6), encoded) == (0, [5])  # one is no JSON
    strict = load(write(tmp_path / "b.jsonl"), checked=0, draws=False, bad_rows="error").rows
    assert strict.look_at_first(5) == 4  # rows 0 to 4, of which one is too long
    with pytest.raises(DataError, match=r"b\.jsonl, line 6: is not JSON"):
        strict.look_at_first(6)
