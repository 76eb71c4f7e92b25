"""The right answers of a row, as data sets have them: a text, a number, a boolean, or several of which each is right.

alternatives({"target": ["4", "four"]}, "answer")           ["4", "four"]
texts(4.0)                                                  {"4.0", "4"}: Parquet has no other 4 beside a null
alternatives(None, "answer")                                ValueError
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# of dictionaries: verl's, TriviaQA's
KEYS = ("target", "ground_truth", "answer", "answers", "value", "aliases", "text")


def alternatives(value: Any, column: str) -> list[Any]:
    """Of which each is right, at least one.

    Errors: ValueError naming the column for a null, an empty list, or numbers of which nobody knows whether each is
    right or all together.
    """
    given = value.tolist() if hasattr(value, "tolist") else value  # of numpy
    found = _alternatives(given)
    if isinstance(given, list | tuple) and len(found) > 1 and not any(isinstance(one, str) for one in found):
        raise ValueError(
            f"column {column!r}: {value!r} is one answer or several; write one as a text, several as "
            '{"target": [...]}'
        )
    if not found:
        raise ValueError(
            f"column {column!r}: {value!r} is no answer; that is a text, a number, a boolean, a list of such, or a "
            f"dictionary with one of {', '.join(KEYS)}"
        )
    return found


def _alternatives(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = [value[key] for key in KEYS if key in value]
    if isinstance(value, list | tuple):
        return [one for entry in value for one in _alternatives(entry)]
    return [] if value is None or (isinstance(value, float) and math.isnan(value)) else [value]


def plain(value: Any) -> str:
    """As it is written without an exponent."""
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return format(Decimal(str(value)), "f")
    return str(value).strip()


def texts(value: Any) -> set[str]:
    """The ways to write one answer."""
    if isinstance(value, bool):
        return {str(value), str(value).lower()}
    written = plain(value)
    has_places = isinstance(value, float | Decimal) and "." in written
    return {str(value).strip(), written, written.rstrip("0").rstrip(".") if has_places else written}
