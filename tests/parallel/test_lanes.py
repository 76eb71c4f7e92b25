"""Parts that come and go beside each other, by a simulated clock: literal seconds."""

import pytest

from tests.bench.staged_step import step_seconds


@pytest.mark.parametrize(
    "parts, copy, step, seconds",
    [
        (0, 3.0, 1.0, 0.0),
        (1, 3.0, 1.0, 7.0),  # comes, is stepped, goes
        (2, 3.0, 1.0, 10.0),  # the second comes (3 to 6) beside the first's step (3 to 4) and the first's way (4 to 7)
        (3, 3.0, 1.0, 14.0),  # the third waits for the first's slot (7 to 10), is stepped (to 11) and goes (to 14)
        (3, 1.0, 5.0, 17.0),  # steps one after the other, with the first's way in and the last's way out
    ],
)
def test_a_slot_is_filled_when_it_is_empty(parts: int, copy: float, step: float, seconds: float) -> None:
    assert step_seconds(parts, copy, step) == seconds
