"""What was left out of the data, and why: the lines that are printed once, and the metrics of an iteration."""

from collections.abc import Sequence
from typing import Any

from hybridflow.data.usable import Dropped, UsableRows


def left_out(key: str, rows: UsableRows[Any], too_long: str) -> list[str]:
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
    if not rows.is_checked:
        size = rows.files.num_bytes / 1e9
        lines.append(
            f"{key}: {size:,.2f} GB are more than data.checked_mib. Each of the {num_rows:,} rows is checked on use"
        )
    return lines


def dropped_metrics(bad_rows: str, overlong: str, dropped: Sequence[Dropped]) -> dict[str, float]:
    """Rows left out at the start and when those of an iteration were drawn; where the config lets them be."""
    found = {}
    if overlong == "drop":
        found["data/dropped_overlong"] = float(sum(its.num_overlong for its in dropped))
    if bad_rows == "drop":
        found["data/dropped_bad"] = float(sum(its.num_bad for its in dropped))
    return found


def reasons(dropped: Dropped) -> str:
    """How many for which reason, and of each the first."""
    counted = [(reason, count) for reason, count in dropped.counts.items() if reason != "too long"]
    return "; ".join(f"{count} {reason} (first: {dropped.first[reason]})" for reason, count in counted)
