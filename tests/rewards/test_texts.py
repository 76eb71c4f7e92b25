"""Formats by regular expression, and penalties for length."""

import pytest

from hybridflow.rewards import length_penalty, matches, opening_of


def test_the_whole_response_or_a_part_of_it() -> None:
    pattern = r"<think>.*</think>\s*<answer>[0-9]+</answer>"
    responses = ["<think>a\nb</think>\n<answer>4</answer>", "x <think></think><answer>4</answer>", "<answer>4</answer>"]
    assert matches(["p"] * 3, responses, {}, pattern=pattern) == [1.0, 0.0, 0.0]
    assert matches(["p"] * 3, responses, {}, pattern=pattern, whole=False) == [1.0, 1.0, 0.0]


THINKS = "<think>.*</think>.*"


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("<\uff5cAssistant\uff5c><think>\n", "<think>\n"),
        ("<\uff5cAssistant\uff5c></think>", "</think>"),
        ("[/INST][THINK]", "[THINK]"),
        ("Assistant: <think>", "<think>"),
        ("Let me solve this step by step.\n<reasoning>", "<reasoning>"),
        ("<|im_start|>assistant\n", ""),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", ""),
        ("<|assistant|>\n", ""),
        ("<|user|>\n<assistant>\n", ""),
        ("put it into <answer></answer>", ""),
        ("is 3 <think>", ""),
        ("", ""),
    ],
)
def test_what_the_prompt_begins_the_response_with(prompt: str, opening: str) -> None:
    assert opening_of(prompt) == opening


def test_a_response_goes_on_from_what_its_prompt_begins() -> None:
    prompts = ["user\nq\nassistant\n<think>\n", "user\nq\nassistant\n"]
    responses = ["two\n</think>\n4"] * 2
    assert matches(prompts, responses, {}, pattern=THINKS) == [1.0, 0.0]
    assert matches(prompts, [f"<think>{text}" for text in responses], {}, pattern=THINKS) == [1.0, 1.0]
    assert matches(prompts, responses, {}, pattern="two.*4") == [1.0, 1.0]
    assert matches(prompts, responses, {}, pattern="<think>", whole=False) == [1.0, 0.0]


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
