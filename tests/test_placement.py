"""What a `ranks` key means, and each rule between roles by hand. What a user reads of them: test_config.py."""

from typing import Any

import pytest

from hybridflow.config.ranks import (
    check_engine_ranks,
    check_engine_sizes,
    check_placement,
    check_ranks,
    check_sizes,
    parse_ranks,
)
from hybridflow.errors import ConfigError
from hybridflow.parallel.ranks import shown


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ("0-3", (0, 1, 2, 3)),
        ("0-7,12", (0, 1, 2, 3, 4, 5, 6, 7, 12)),
        ("1,3", (1, 3)),
        ("0-1, 4 ,6-7", (0, 1, 4, 6, 7)),
        ("0-3,4", (0, 1, 2, 3, 4)),
        ("5-5", (5,)),
        ("3", (3,)),
        (3, (3,)),
        (0, (0,)),
        (None, None),
    ],
)
def test_what_ranks_mean(given: Any, ranks: tuple[int, ...] | None) -> None:
    assert parse_ranks(given) == ranks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "'': '' is no rank and no interval; ranks are"),
        ("0-", "'0-': '0-' is no rank and no interval; ranks are"),
        ("0-3,", "'0-3,': '' is no rank"),
        ("-1", "'-1': '-1' is no rank"),
        (-1, "-1: '-1' is no rank"),
        ("0..3", "'0..3': '0..3' is no rank"),
        ("0 - 3", "'0 - 3': '0 - 3' is no rank"),
        ("\u0663", "'\u0663': '\u0663' is no rank"),  # a digit, but not one of ours
        ("4,3-1", "'4,3-1': the interval 3-1 is empty; ranks are"),
        ("3,1", "'3,1' names 3,1: ranks are inclusive intervals and single ranks, ascending, each once"),
        ("0-3,3-5", "'0-3,3-5' names 0-3,3-5: ranks are"),
        ("0-2000000000", "'0-2000000000': no run has a rank 2000000000"),
        (True, "True: ranks are"),
        (0.0, "0.0: ranks are"),
        ({0: 2}, "{0: 2}: ranks are"),
    ],
)
def test_what_no_ranks_are(given: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_ranks(given)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "spelling"),
    [
        ([0, 8], "0-7"),  # two entries were an interval
        ([0, 1], "0"),
        ((1, 3), "1-2"),
        ([3], "3"),
        ([0, 1, 4, 5], "0-1,4-5"),
        ([[0, 2]], "0-1"),
        ([[0, 1], [4, 5]], "0,4"),
        ([[0, 2], [2, 4]], "0-3"),
        ([(0, 2), (4, 6)], "0-1,4-5"),
    ],
)
def test_lists_are_refused_with_what_they_are_written_as_now(given: Any, spelling: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_ranks(given)
    listed = [list(entry) if isinstance(entry, tuple) else entry for entry in given]
    assert str(raised.value) == f'{listed} is now written "{spelling}"'


@pytest.mark.parametrize(
    "given",
    [[], (), [0, "1"], [0, 1, "x"], [[0, 2], 3], [[0, 2], [3]], [[]], [0.0, 2.0], [True], [0, 2, 1], [3, 1], [-1, 2]],
)
def test_lists_that_never_meant_ranks(given: Any) -> None:
    with pytest.raises(ValueError, match=": ranks are inclusive intervals and single ranks, "):
        parse_ranks(given)


def test_ranks_exist() -> None:
    assert check_ranks("actor.ranks", None, 4) == (0, 1, 2, 3)
    assert check_ranks("actor.ranks", (1, 3), 4) == (1, 3)
    for given, rank in (((4,), 4), ((0, 1, 9), 9)):
        with pytest.raises(
            ConfigError, match=rf"= {shown(given)} names rank {rank}, the run has 4 ranks. Set actor.ranks=0-3$"
        ):
            check_ranks("actor.ranks", given, 4)


@pytest.mark.parametrize("sizes", [(1, 1, None), (2, 1, None), (2, 2, None), (4, 1, 1), (1, 2, 2), (1, 1, 4)])
def test_sizes_that_fill_four_ranks(sizes: tuple[int, int, int | None]) -> None:
    check_sizes("actor", {"tp": sizes[0], "pp": sizes[1]}, sizes[2], None, (0, 1, 2, 3))


@pytest.mark.parametrize("sizes", [(3, 1, None), (1, 3, None), (2, 4, None), (1, 1, 3), (2, 2, 2), (4, 4, 1)])
def test_sizes_that_do_not(sizes: tuple[int, int, int | None]) -> None:
    with pytest.raises(ConfigError):
        check_sizes("actor", {"tp": sizes[0], "pp": sizes[1]}, sizes[2], None, (0, 1, 2, 3))


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
    with pytest.raises(ConfigError, match=r"^a = 0-1 and b = 1-3 overlap in 1 only"):
        check_placement({"a": (0, 1), "b": (1, 2, 3)}, 4)
    with pytest.raises(ConfigError, match=r"^b = 0,2 and c = 0-1 overlap in 0 only"):
        check_placement({"a": (0, 1, 2), "b": (0, 2), "c": (0, 1)}, 3)


def test_a_rank_without_work() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^of the 5 ranks of the run nothing uses 1,4, which leaves 2 ranks idle: a = 0, b = 2-3"
        r". Set a=0-1,4, or b=1-4, or take 3 ranks$",
    ):
        check_placement({"a": (0,), "b": (2, 3)}, 5)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "0"), ((0, 1), "0-1"), ((4, 5, 6), "4-6"), ((0, 2), "0,2"), ((0, 1, 3, 5, 6), "0-1,3,5-6")],
)
def test_shown(ranks: tuple[int, ...], text: str) -> None:
    assert shown(ranks) == text
