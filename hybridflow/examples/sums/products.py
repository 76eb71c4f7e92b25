"""Products with a calculator that is asked in plain text, for a model whose chat template knows no tools."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.environments import ModelTurn

SOLVED: Sequence[tuple[int, int]] = ((23, 45), (57, 38))
CALL = re.compile(r"CALC (\d{1,3}) \* (\d{1,3})")
Message = dict[str, str]


class Products:
    """The model writes `CALC 84 * 69`, reads 5796 and says it. The reward is 1 for the right product, else 0."""

    def start(self, row: Mapping[str, Any]) -> list[Message]:
        self.answer = str(row["answer"])
        solved = [message for a, b in SOLVED for message in _solved(a, b)]
        return [*solved, {"role": "user", "content": str(row["question"])}]

    def step(self, said: ModelTurn) -> float | list[Message]:
        text = said.text.strip()
        call = CALL.fullmatch(text)
        if call is not None and not said.last:
            return [{"role": "user", "content": str(int(call[1]) * int(call[2]))}]
        return float(text == self.answer)


def question(a: int, b: int) -> str:
    return f"{a} * {b} ="


def _solved(a: int, b: int) -> list[Message]:
    """A conversation to follow."""
    product = str(a * b)
    turns = (question(a, b), f"CALC {a} * {b}", product, product)
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
