"""Formats by regular expression, and penalties for length."""

import pytest

from hybridflow.rewards import length_penalty, matches


def test_the_whole_response_or_a_part_of_it() -> None:
    pattern = r"<think>.*</think>\s*<answer>[0-9]+</answer>"
    responses = ["<think>a\nb</think>\n<answer>4</answer>", "x <think></think><answer>4</answer>", "<answer>4</answer>"]
    assert matches(["p"] * 3, responses, {}, pattern=pattern) == [1.0, 0.0, 0.0]
    assert matches(["p"] * 3, responses, {}, pattern=pattern, whole=False) == [1.0, 1.0, 0.0]


def test_a_pattern_that_is_none_is_told_without_any_row() -> None:
    with pytest.raises(ValueError, match=r"pattern '\(' is no regular expression: missing \), unterminated subpattern"):
        matches([], [], {}, pattern="(")


def test_length_costs_from_its_start_to_its_limit() -> None:
    responses = ["x" * n for n in (0, 10, 15, 20, 50)]
    assert length_penalty(["p"] * 5, responses, {}, start=10, limit=20) == [0.0, 0.0, -0.5, -1.0, -1.0]
    words = ["a b", "a b c", "a b  c\nd"]
    assert length_penalty(["p"] * 3, words, {}, start=2, limit=4, unit="words") == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"start": 5, "limit": 5}, "start = 5 and limit = 5"),
        ({"start": -1, "limit": 5}, "start = -1 and limit = 5"),
        ({"start": 1, "limit": 5, "unit": "tokens"}, "unit = 'tokens' is neither characters nor words"),
    ],
)
def test_arguments_that_are_none_are_told(arguments: dict, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        length_penalty([], [], {}, **arguments)
