"""Frontiers of roles together, against all sums of their options."""

import itertools

import numpy as np
import pytest

from hybridflow.automap.frontier import MOST_POINTS, Frontier


def roles(count: int, options: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [(random.integers(0, 1000, options), random.random(options)) for _ in range(count)]


def least(given: list[tuple[np.ndarray, np.ndarray]], room: int) -> float:
    found = [
        sum(seconds[i] for (_, seconds), i in zip(given, chosen, strict=True))
        for chosen in itertools.product(*(range(len(held)) for held, _ in given))
        if sum(held[i] for (held, _), i in zip(given, chosen, strict=True)) <= room
    ]
    return min(found, default=float("inf"))


def test_a_frontier_by_hand() -> None:
    found = Frontier.from_points(np.array([4, 2, 6, 2, 5]), np.array([2.0, 5.0, 1.0, 4.0, 2.0]))
    assert (found.bytes.tolist(), found.seconds.tolist()) == ([2, 4, 6], [4.0, 2.0, 1.0])
    assert found.within(np.array([1, 2, 3, 4, 9])).tolist() == [float("inf"), 4.0, 4.0, 2.0, 1.0]
    assert Frontier.nothing().within(np.array([-1, 0])).tolist() == [float("inf"), 0.0]


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_the_least_of_all_choices(seed: int) -> None:
    given = roles(3, 6, seed)
    found = Frontier.nothing()
    for held, seconds in given:
        found = found.plus(held, seconds)
    rooms = np.array([0, 100, 400, 900, 1500, 3000])
    assert found.within(rooms) == pytest.approx([least(given, room) for room in rooms])


def test_with_many_points_it_is_never_above() -> None:
    held = np.arange(3 * MOST_POINTS)
    seconds = 1.0 / (1 + held)
    exact, coarse = lambda room: 1.0 / (1 + room), Frontier.from_points(held, seconds)
    assert len(coarse.bytes) == MOST_POINTS
    rooms = held[::7]
    assert (coarse.within(rooms) <= exact(rooms)).all() and (coarse.within(rooms) >= exact(rooms + 3)).all()
