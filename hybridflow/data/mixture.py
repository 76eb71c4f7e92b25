"""How often a run sees the rows of each source, where sources with weights take turns: lines for a person."""

from typing import Any

from hybridflow.data.order import rows_of_sources
from hybridflow.data.usable import UsableRows


def mixture_lines(key: str, rows: UsableRows[Any], num_rows: int, *, at_least: bool = False) -> list[str]:
    """A line for each source of a run that takes so many rows from the first iteration on; none without weights.

    at_least: the run may take more.
    """
    files = rows.files
    if files.weights is None:
        return []
    taken = rows_of_sources(files.weights, num_rows)
    least = "at least " if at_least else ""
    return [
        f"{key}: {name} (weight {weight:g}): the run takes {least}{count} of {num_rows} rows here, "
        f"{length} rows are there: {_often(count, length)}"
        for name, weight, count, length in zip(files.names, files.weights, taken, rows.lengths(), strict=True)
    ]


def _often(count: int, length: int) -> str:
    times, rest = divmod(count, length)
    if not rest:
        return f"each row {_times(times)}"
    if not times:
        return f"{rest} rows once, {length - rest} never"
    return f"{rest} rows {_times(times + 1)}, {length - rest} {_times(times)}"


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")
