"""The turns of a response, and one text of them in which what is not the model's is marked. Without torch."""

from collections.abc import Iterable
from typing import TypedDict

OPENS, CLOSES = "\u27e6", "\u27e7"  # around what an environment has written


class Turn(TypedDict):
    """Of a response: by "model" or "environment". What the environment has written is not trained on."""

    by: str
    text: str


def marked(turns: Iterable[Turn]) -> str:
    return "".join(turn["text"] if turn["by"] == "model" else f"{OPENS}{turn['text']}{CLOSES}" for turn in turns)
