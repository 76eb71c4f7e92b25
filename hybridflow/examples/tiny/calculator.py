"""An environment of two turns: the model calls a calculator, reads the result and answers: quickstart_tools.yaml."""

from collections.abc import Mapping
from typing import Any

from hybridflow.environments import ModelTurn


class Calculator:
    """The reward is 1 for the right product as the whole answer, and 0 for any other."""

    tools = ("multiply",)

    def start(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        self.answer = str(row["answer"])
        return [{"role": "user", "content": str(row["question"])}]

    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(a * b)

    def step(self, said: ModelTurn) -> float:
        return float(said.text.strip() == self.answer)
