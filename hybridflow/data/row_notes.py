"""Lines for a person about the rows of files, and metrics: what was left out and why, how often each source is seen."""

from collections.abc import Sequence
from typing import Any

from hybridflow.data.order import rows_of_sources
from hybridflow.data.usable import Dropped, UsableRows


def left_out_lines(key: str, rows: UsableRows[Any], too_long: str) -> list[str]:
    """Of a file, at the start: how files were chosen, a line for rows that are too long, one for rows that cannot be
    used; or what is still unknown.

    too_long: what rows are that are too long.
    """
    dropped, num_rows = rows.dropped, len(rows) + rows.dropped.num_rows
    lines = [*rows.files.notes]
    if dropped.num_overlong:
        lines.append(f"{key}: left out {dropped.num_overlong} of {num_rows} {too_long}")
    if dropped.num_bad:
        lines.append(f"{key}: left out {dropped.num_bad} of {num_rows} rows that cannot be used: {reasons(dropped)}")
    if rows.not_started.num_rows:
        lines.append(
            f"{key}: {rows.not_started.num_rows} of {num_rows} rows do not start now. A row that does not start when "
            f"its turn comes is passed over: {reasons(rows.not_started)}"
        )
    if not rows.is_checked:
        size = rows.files.num_bytes / 1e9
        large = f"{size:,.2f} GB are more than data.checked_mib. Each" if rows.checked_bytes else "each"
        lines.append(f"{key}: {large} of the {num_rows:,} rows is checked on use")
    return lines


def dropped_metrics(
    bad_rows: str, overlong: str, dropped: Sequence[Dropped], *, begins: bool = False
) -> dict[str, float]:
    """Rows left out at the start and when those of an iteration were drawn; where the config lets them be.

    begins: an environment begins rows, and one that it does not begin is left out.
    """
    found = {}
    if overlong == "drop":
        found["data/dropped_overlong"] = float(sum(each.num_overlong for each in dropped))
    if bad_rows == "drop":
        found["data/dropped_bad"] = float(sum(each.num_bad for each in dropped))
    if begins:
        found["data/dropped_not_started"] = float(sum(each.num_not_started for each in dropped))
    return found


def reasons(dropped: Dropped) -> str:
    """How many for which reason, and of each the first."""
    counted = [(reason, count) for reason, count in dropped.counts.items() if reason != "too long"]
    return "; ".join(f"{count} {reason} (first: {dropped.first[reason]})" for reason, count in counted)


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
