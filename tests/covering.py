"""Covering arrays: any two values of two axes stand together in at least one case, of which a product has many more."""

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

Value = tuple[str, Any]  # an axis, and what a case has there


def pair(values: Mapping[str, Any], *axes: str) -> tuple[Value, Value]:
    """Of a case's values, those of two axes, which are named in the order that the axes have."""
    one, other = ((axis, values[axis]) for axis in axes)
    return one, other


def uncovered(axes: Mapping[str, Collection[Any]], cases: Iterable[Mapping[str, Any]]) -> set[tuple[Value, Value]]:
    """Pairs of values of two axes that stand together in no case."""
    either = list(combinations(axes, 2))
    every = {((a, x), (b, y)) for a, b in either for x, y in product(axes[a], axes[b])}
    return every - {pair(case, *both) for case in cases for both in either}


def params(default: Iterable[Any], rest: Iterable[Any] = (), weekly: Iterable[Any] = ()) -> list[Any]:
    """Of cases, what `pytest.mark.parametrize` takes: those of the default set, of the rest, and of the weekly set."""
    sets: tuple[tuple[Iterable[Any], tuple[pytest.MarkDecorator, ...]], ...] = (
        (default, ()),
        (rest, (pytest.mark.thorough,)),
        (weekly, (pytest.mark.weekly,)),
    )
    rows = ((case if type(case) is tuple else (case,), marks) for cases, marks in sets for case in cases)
    return [pytest.param(*row, marks=marks) for row, marks in rows]
