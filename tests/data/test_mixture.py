"""How often a run sees the rows of weighted sources: as the order hands them out."""

import json
from collections import Counter
from pathlib import Path

import pytest

from hybridflow.config.data import SourceConfig
from hybridflow.data.order import MixedOrder, rows_of_sources
from hybridflow.data.row_notes import mixture_lines
from hybridflow.data.sources import open_files
from hybridflow.data.usable import Rules, UsableRows


def rows_of(directory: Path, lengths: list[int], weights: list[float | None]) -> UsableRows[object]:
    sources = []
    for number, (length, weight) in enumerate(zip(lengths, weights, strict=True)):
        file = directory / f"{number}.jsonl"
        file.write_text("".join(json.dumps({"row": i}) + "\n" for i in range(length)))
        sources.append(SourceConfig(path=str(file), weight=weight))
    return UsableRows(open_files(tuple(sources), "data.train"), list, Rules("error", "error"))


def test_each_source_says_how_often_its_rows_are_seen(tmp_path: Path) -> None:
    """One epoch of 80 rows by halves: 40 from each, 5 times the 8 rows of one, 40 of the other's 72 once."""
    small, large = mixture_lines("data.train", rows_of(tmp_path, [8, 72], [1, 1]), 80)
    where, many = f"data.train: {tmp_path}/0.jsonl (weight 1)", "each row 5 times"
    assert small == f"{where}: the run takes 40 of 80 rows here, 8 rows are there: {many}"
    assert large.endswith("(weight 1): the run takes 40 of 80 rows here, 72 rows are there: 40 rows once, 32 never")
    small, large = mixture_lines("data.train", rows_of(tmp_path, [8, 72], [3, 1]), 20, at_least=True)
    assert small.endswith("the run takes at least 15 of 20 rows here, 8 rows are there: 7 rows twice, 1 once")
    assert large.endswith("the run takes at least 5 of 20 rows here, 72 rows are there: 5 rows once, 67 never")


def test_files_without_weights_are_one_order(tmp_path: Path) -> None:
    assert mixture_lines("data.train", rows_of(tmp_path, [8, 72], [None, None]), 80) == []


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.1, 0.7, 0.2), (1.0, 999.0)])
def test_the_counts_are_those_of_the_order(weights: tuple[float, ...]) -> None:
    lengths = range(3, 3 + len(weights))
    for num_rows in (1, 7, 64, 1003):
        taken = MixedOrder(lengths, weights, seed=0, shuffle=True).next(num_rows)
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        found = Counter(sum(index >= end for end in ends) for index in taken)
        assert rows_of_sources(weights, num_rows) == [found[source] for source in range(len(weights))]
