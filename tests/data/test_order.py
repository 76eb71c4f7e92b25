"""Rows of several sources by turns: shares, places, and that a place is all there is to know."""

import pytest

from hybridflow.data.order import MixedOrder, PromptOrder, shares


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1), (1, 1)),
        ((2, 1), (2, 1)),
        ((0.5, 0.25, 0.25), (2, 1, 1)),
        ((0.7, 0.3), (7, 3)),
        ((10, 4), (5, 2)),
        ((999, 1), (999, 1)),
        ((1000, 1), (999, 1)),
        ((3.14159, 1), (355, 113)),
        ((3.14159, 2.71828), (536, 464)),
        ((1, 1, 1e-6), (500, 500, 0)),
    ],
)
def test_shares(weights, expected) -> None:
    assert shares(weights) == expected


def test_sources_take_turns_evenly_and_begin_anew_each_for_itself() -> None:
    """Rows 0 and 1 are of the first source, 2 to 4 of the second, which has the weight 2."""
    order = MixedOrder((2, 3), (1, 2), seed=0, shuffle=False)
    assert order.next(12) == [2, 0, 3, 4, 1, 2, 3, 0, 4, 2, 1, 3]


def test_the_mixed_order_does_not_change_between_releases() -> None:
    assert MixedOrder((4, 3), (1, 1), seed=0, shuffle=True).next(14) == [1, 6, 2, 5, 0, 4, 3, 6, 1, 5, 0, 4, 2, 5]


def test_sources_are_shuffled_each_for_itself() -> None:
    drawn = MixedOrder((8, 8), (1, 1), seed=3, shuffle=True).next(32)
    first, second = ([i % 8 for i in drawn if i // 8 == source] for source in (0, 1))
    assert sorted(first[:8]) == sorted(first[8:]) == sorted(second[:8]) == list(range(8))
    assert first[:8] != first[8:] and first != second
    assert first == PromptOrder(8, 3, True, salt=" source 0").next(16)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 100])
def test_a_resumed_mixed_order_goes_on_exactly(position, shuffle) -> None:
    def order(start: int) -> MixedOrder:
        return MixedOrder((5, 3, 2), (4, 2, 1), seed=1, shuffle=shuffle, position=start)

    whole = order(0)
    whole.next(position)
    parts = order(position)
    assert whole.next(30) == [i for count in (1, 2, 3, 24) for i in parts.next(count)]
    assert parts.position == whole.position == position + 30
