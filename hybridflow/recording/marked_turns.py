"""The turns of a response, and one text of them in which what is not the model's is marked. Without torch."""

from collections.abc import Iterable
from typing import NotRequired, TypedDict

OPENS, CLOSES = "\u27e6", "\u27e7"  # around what an environment has written
ANOTHER = "\n--- another sequence of the row ---\n"


class Turn(TypedDict):
    """Of a response: by "model" or "environment". What the environment has written is not trained on.

    begins: another sequence of the row, which the model reads by itself.
    """

    by: str
    text: str
    begins: NotRequired[bool]


def marked(turns: Iterable[Turn]) -> str:
    return "".join(_marked(turn) for turn in turns)


def _marked(turn: Turn) -> str:
    text = turn["text"] if turn["by"] == "model" else f"{OPENS}{turn['text']}{CLOSES}"
    return f"{ANOTHER}{text}" if turn.get("begins") else text
