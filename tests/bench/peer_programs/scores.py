"""The reward function of the group workloads: of no meaning, and next to no cost, in all programs alike."""

from typing import Any


def score(response: str) -> float:
    return len(response) % 7 / 7


def by_length(prompts: list[str], responses: list[str], columns: dict[str, list[Any]]) -> list[float]:
    return [score(response) for response in responses]
