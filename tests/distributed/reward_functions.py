"""Reward functions that tests name in configs, as tests.distributed.reward_functions:NAME.

Those that fail do so for rows whose `answer` is BAD_ANSWER, so that a test chooses when, and on which rank.
"""

import signal
from typing import Any

BAD_ANSWER = "bad"

Columns = dict[str, list[Any]]


def raises(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    if BAD_ANSWER in columns["answer"]:
        raise ValueError("this answer has no score")
    return [0.5] * len(responses)


def not_a_number(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    return [float("nan") if answer == BAD_ANSWER else 0.5 for answer in columns["answer"]]


def one_short(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    return [0.5 for answer in columns["answer"] if answer != BAD_ANSWER]


def length(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
    return [float(len(prompt)) for prompt in prompts]


def response_length(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    return [float(len(response)) for response in responses]


def share_of_even(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """Of responses that are token ids with spaces between them."""
    tokens = [[int(token) for token in response.split()] for response in responses]
    return [sum(token % 2 == 0 for token in row) / len(row) for row in tokens]


def num_letters(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """Different ones."""
    return [float(len(set(response))) for response in responses]


def beside_the_others(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """How long a response is relative to those in the same list, which are to be the prompt's."""
    assert len(set(prompts)) == 1, f"responses to {len(set(prompts))} prompts in one call"
    most = max(map(len, responses)) + 1
    return [(len(response) + i) / most for i, response in enumerate(responses)]


def in_main_thread(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """As one that sets an alarm for itself."""
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    return num_letters(prompts, responses, columns)


def later(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """One row in a call."""
    assert len(prompts) == len(responses) == 1
    return [float(len(responses[0]))]


def share(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """Of all letters of the rollout: each row depends on every other."""
    total = sum(map(len, responses)) + 1
    return [(len(response) + i) / total for i, response in enumerate(responses)]
