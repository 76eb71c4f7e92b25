"""A reward function whose scores are equal within some groups and not within others."""

from typing import Any


def first_is_a_digit(prompts: list[str], responses: list[str], columns: dict[str, list[Any]]) -> list[float]:
    return [float(response.strip()[:1].isdigit()) for response in responses]
