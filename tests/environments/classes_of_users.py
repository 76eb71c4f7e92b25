"""Environments as users write them, good and bad; tests name them in configs."""

import functools
import os
import random
import time
from typing import Any

from hybridflow.environments import ModelTurn, Said


class Talk:
    """Answers every turn until the third, at any time; a row's reward is the number of characters said, over 100."""

    tools = ("add", "fails")

    def __init__(self, turns: int = 3, delay: float = 0.0) -> None:
        self.turns, self.delay, self.said = turns, delay, list[ModelTurn]()

    def start(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self.row = row
        return [{"role": "user", "content": row["question"]}]

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self._wait()
        return str(a + b)

    def fails(self, n: int) -> str:
        """Fail.

        Args:
            n: A number.
        """
        raise ValueError(f"not {n}")

    def step(self, said: Said) -> float | list[dict[str, str]]:
        self._wait()
        self.said.append(said)
        if len(self.said) < self.turns and not said.last:
            return [{"role": "user", "content": f"no {len(said.text)}"}]
        return sum(len(each.text) for each in self.said) / 100

    def _wait(self) -> None:
        if self.delay:
            time.sleep(random.SystemRandom().uniform(0.0, self.delay))


class FailsAt(Talk):
    """Talk, but for the question that begins with this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def step(self, said: Said) -> float | list[dict[str, str]]:
        assert int(self.row["question"].partition("+")[0]) != self.number, "on purpose"
        return super().step(said)


class Sleeps:
    """Rows of the questions 2 and 3 go on for longer than anybody waits, the one in a call, the other in many turns."""

    def start(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self.number = int(row["question"].partition("+")[0])
        return [{"role": "user", "content": row["question"]}]

    def step(self, said: ModelTurn) -> float | list[dict[str, str]]:
        if self.number < 2:
            return float(len(said.text))
        time.sleep(60 if self.number == 2 else 2)
        return [{"role": "user", "content": "no"}]


class NeverDone:
    """Gives no number, whatever is said."""

    def start(self, row: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["question"]}]

    def step(self, said: ModelTurn) -> list[dict[str, str]]:
        return [{"role": "user", "content": "no"}]


class Fragile(NeverDone):
    """By the row's question: raises, hangs, dies, or gives a number that is none; others end after a turn."""

    def start(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self.row = row
        return super().start(row)

    def step(self, said: ModelTurn) -> Any:
        number = int(self.row["question"].partition("+")[0])
        if number == 1:
            raise ValueError("on purpose")
        if number == 2:
            time.sleep(600)
        if number == 3:
            os._exit(7)
        return {4: float("nan"), 5: "a text"}.get(number, 1.0)


class Parts(NeverDone):
    def step(self, said: ModelTurn) -> dict[str, float]:
        return {"right": 1.0, "short": len(said.text) / 10}


class WithoutStep:
    def start(self, row: dict[str, Any]) -> list[dict[str, str]]:
        return []


class WithoutTypes(NeverDone):
    tools = ("add",)

    def add(self, a, b):  # type: ignore[no-untyped-def]
        """Add.

        Args:
            a: The first.
            b: The second.
        """


class WithoutDocstring(NeverDone):
    tools = ("add",)

    def add(self, a: int) -> str:
        return ""


class WithoutTool(NeverDone):
    tools = ("add",)


class Workers(NeverDone):
    """Does in its process what is said."""

    def __init__(self) -> None:
        self.on_close = ""

    def step(self, said: ModelTurn) -> float:
        word, _, rest = said.text.partition(" ")
        if word == "sleep":
            time.sleep(600)
        if word == "half":
            time.sleep(0.5)
        if word == "close":
            self.on_close = rest
        return {"pid": float(os.getpid()), "random": random.random()}.get(word, 0.0)

    def close(self) -> None:
        if self.on_close:
            with open(self.on_close, "w"):
                pass


class Noted(NeverDone):
    """Writes a line into a file whenever a row begins."""

    def __init__(self, file: str) -> None:
        self.file = file

    def start(self, row: dict[str, Any]) -> list[dict[str, str]]:
        with open(self.file, "a") as file:
            file.write(row["question"] + "\n")
        return super().start(row)


def decorated(function: Any) -> Any:
    """As a package's decorator that does not keep what it decorates."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class Waits(NeverDone):
    tools = ("later", "plainly")

    async def _doubled(self, n: int) -> dict[str, int]:
        if n > 1:
            raise ValueError(f"not {n}")
        return {"n": 2 * n}

    later = decorated(_doubled)
    plainly = functools.wraps(_doubled)(decorated(_doubled))
