"""What a `ranks` key means, and each rule between roles by hand. What a user reads of them: test_config.py."""

from typing import Any

import pytest

from hybridflow.errors import ConfigError
from hybridflow.placement import (
    check_engine_ranks,
    check_engine_sizes,
    check_placement,
    check_ranks,
    check_sizes,
    resolve_ranks,
    shown,
    well_formed,
)


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        (None, (0, 1, 2, 3)),
        ((1, 3), (1, 2)),  # two entries are an interval
        ((0, 1), (0,)),
        ((3,), (3,)),
        ((0, 1, 3), (0, 1, 3)),
        (((0, 2),), (0, 1)),
        (((0, 1), (2, 4)), (0, 2, 3)),
        (((1, 2), (3, 4)), (1, 3)),  # how two ranks apart are said
    ],
)
def test_what_ranks_mean(given: Any, ranks: tuple[int, ...]) -> None:
    assert resolve_ranks(given, 4) == ranks
    assert check_ranks("actor.ranks", given, 4) == ranks
    assert well_formed(given) == given


@pytest.mark.parametrize(
    "given", [[], (), 3, "0-3", [0, "1"], [[0, 2], 3], [[0, 2], [3]], [[]], [0.0, 2.0], {0: 2}, [True]]
)
def test_what_no_ranks_are(given: Any) -> None:
    with pytest.raises(ValueError, match="is neither"):
        well_formed(given)


@pytest.mark.parametrize("given", [(0, 2, 1), (1, 1, 1), ((2, 4), (0, 2)), ((0, 2), (1, 3))])
def test_ranks_ascend(given: Any) -> None:
    with pytest.raises(ConfigError, match="ranks must ascend, each named once"):
        check_ranks("actor.ranks", given, 4)


@pytest.mark.parametrize("given", [(2, 2), (3, 1), ((1, 1),)])
def test_intervals_are_not_empty(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"is an empty interval: \[start, stop\] needs start < stop"):
        check_ranks("actor.ranks", given, 4)


@pytest.mark.parametrize(
    ("given", "rank"), [((0, 5), 4), ((4,), 4), ((-1, 1), -1), ((-2, 0, 1), -2), ((-1, 9), 8), (((0, 1), (3, 9)), 8)]
)
def test_ranks_exist(given: Any, rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"names rank {rank}, the run has 4 ranks: 0 \.\. 3"):
        check_ranks("actor.ranks", given, 4)


@pytest.mark.parametrize("sizes", [(1, 1, None), (2, 1, None), (2, 2, None), (4, 1, 1), (1, 2, 2), (1, 1, 4)])
def test_sizes_that_fill_four_ranks(sizes: tuple[int, int, int | None]) -> None:
    check_sizes("actor", sizes, None, (0, 1, 2, 3))


@pytest.mark.parametrize("sizes", [(3, 1, None), (1, 3, None), (2, 4, None), (1, 1, 3), (2, 2, 2), (4, 4, 1)])
def test_sizes_that_do_not(sizes: tuple[int, int, int | None]) -> None:
    with pytest.raises(ConfigError):
        check_sizes("actor", sizes, None, (0, 1, 2, 3))


def test_the_engine_on_the_actors_ranks_or_on_others() -> None:
    check_engine_ranks((0, 1), (0, 1))
    check_engine_ranks((2, 3), (0, 1))


@pytest.mark.parametrize("ranks", [(0,), (1, 2), (0, 1, 2, 3), (1, 3)])
def test_the_engine_on_some_of_the_actors_ranks(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="exactly the actor's ranks"):
        check_engine_ranks(ranks, (0, 1))


@pytest.mark.parametrize(("tp", "pp", "num_ranks"), [(1, 1, 3), (2, 1, 4), (2, 2, 4), (1, 3, 6)])
def test_engines_that_fill_their_ranks(tp: int, pp: int, num_ranks: int) -> None:
    check_engine_sizes(tp, pp, num_ranks)
    with pytest.raises(ConfigError, match=f"does not divide the {num_ranks} ranks of the engine: {num_ranks} = 0 x "):
        check_engine_sizes(num_ranks + 1, pp, num_ranks)


@pytest.mark.parametrize("other", [(0, 1, 2, 3), (0, 1), (2, 3), (1,), (0, 1, 3)])
def test_roles_together_apart_or_within(other: tuple[int, ...]) -> None:
    check_placement({"a": (0, 1, 2, 3), "b": other}, 4)


def test_roles_that_overlap_partly() -> None:
    check_placement({"a": (0, 1), "b": (2, 3)}, 4)
    with pytest.raises(ConfigError, match=r"^a = 0 \.\. 1 and b = 1 \.\. 3 overlap in 1 only"):
        check_placement({"a": (0, 1), "b": (1, 2, 3)}, 4)
    with pytest.raises(ConfigError, match=r"^b = 0, 2 and c = 0 \.\. 1 overlap in 0 only"):
        check_placement({"a": (0, 1, 2), "b": (0, 2), "c": (0, 1)}, 3)


def test_a_rank_without_work() -> None:
    with pytest.raises(ConfigError, match=r"^of the 5 ranks of the run nothing uses 1, 4: a = 0, b = 2 \.\. 3$"):
        check_placement({"a": (0,), "b": (2, 3)}, 5)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "0"), ((0, 1), "0 .. 1"), ((4, 5, 6), "4 .. 6"), ((0, 2), "0, 2"), ((0, 1, 3), "0, 1, 3")],
)
def test_shown(ranks: tuple[int, ...], text: str) -> None:
    assert shown(ranks) == text
