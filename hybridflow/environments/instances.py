"""The instances of a user's class in a worker process: one a row, called by one message after the other.

    {"kind": "start", "row": 3, "seed": "7,2", "columns": {...}}            -> {"messages": [...]}
    {"kind": "turn", "row": 3, "said": (...), "calls": [...]}               -> {"messages": [...]} or {"reward": [...]}
    {"kind": "step", "row": 3, "said": (...)}                               the same, without tools
    {"kind": "close", "row": 3}                                             -> {}

The model's mistakes become messages of the role `tool`. What the class itself raises is an error of the row. Random
numbers of `random` and numpy begin anew with each call: those of `start` by the columns, since all rows of a prompt
have to begin alike; later ones by the row's seed, which its group shares, and the number of the call.
"""

import json
import math
import numbers
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.classes import load_class, tool_names
from hybridflow.environments.said import Said
from hybridflow.errors import RewardError

Message = dict[str, Any]
USERS = (Exception, SystemExit)  # what a user's code raises that is an error of its own
MOST_SHOWN = 200  # characters of a value in a message


@dataclass
class Instance:
    """seed: of the row."""

    environment: Any
    seed: str
    num_calls: int = 0


class Instances:
    """Of one worker. path: package.module:Class. arguments: of the class. parts: of its rewards, none of numbers."""

    def __init__(self, path: str, arguments: Mapping[str, Any], parts: Sequence[str]) -> None:
        self._class, self._arguments, self._parts = load_class(path), dict(arguments), tuple(parts)
        self._tools = tool_names(self._class, path)
        self._there: dict[int, Instance] = {}

    def __call__(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """See the module. Errors: RewardError that tells what the class did."""
        kind, row = asked["kind"], asked["row"]
        if kind == "close":
            return self._closed(row)
        if kind == "start":
            self._there[row] = Instance(None, asked["seed"])
        instance = self._there[row]
        begins = json.dumps(asked.get("columns"), default=str, sort_keys=True)
        _seed(begins if kind == "start" else f"{instance.seed},{instance.num_calls}")
        instance.num_calls += 1
        if kind == "start":
            instance.environment = _called("the constructor", self._class, **self._arguments)
            return {"messages": _messages(_called("start", instance.environment.start, asked["columns"]), "start")}
        if asked.get("calls"):
            return self._tool_messages(instance.environment, asked["calls"])
        return self._answer(_called("step", instance.environment.step, Said(*asked["said"])))

    def _closed(self, row: int) -> dict[str, Any]:
        instance = self._there.pop(row, None)
        close = getattr(instance.environment, "close", None) if instance is not None else None
        if close is not None:
            _called("close", close)
        return {}

    def _tool_messages(self, environment: Any, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Of each call its result, or what was wrong with it."""
        told = [self._tool_result(environment, call) for call in calls]
        messages = [
            {"role": "tool", "name": call["name"], "content": content}
            for call, (content, _) in zip(calls, told, strict=True)
        ]
        return {"messages": messages, "failed_calls": sum(failed for _, failed in told)}

    def _tool_result(self, environment: Any, call: Mapping[str, Any]) -> tuple[str, bool]:
        """(text, whether the call failed)."""
        if call["problem"]:
            return f"error: {call['problem']}", True
        if call["name"] not in self._tools:
            known = ", ".join(self._tools) or "none"
            return f"error: there is no tool {call['name']!r}; the tools are {known}", True
        if not isinstance(call["arguments"], dict):
            return f"error: the arguments of {call['name']} are no JSON object", True
        try:
            result = getattr(environment, call["name"])(**call["arguments"])
            return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False), False
        except USERS as error:  # the model is told what its arguments have done
            return f"error: {type(error).__name__}: {error}", True

    def _answer(self, returned: Any) -> dict[str, Any]:
        if isinstance(returned, list | tuple):
            return {"messages": _messages(returned, "step")}
        return {"reward": self._reward(returned)}

    def _reward(self, returned: Any) -> list[float]:
        """Of each part. Errors: RewardError unless it is what the config says."""
        if not self._parts:
            return [_number(returned, "step returned")]
        if not isinstance(returned, Mapping) or set(returned) != set(self._parts):
            raise RewardError(
                f"step returned {_shown(returned)}; data.environment.parts asks for a dictionary of "
                f"{', '.join(self._parts)}"
            )
        return [_number(returned[part], f"step returned {part} =") for part in self._parts]


def _called(what: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except USERS as error:  # the boundary to a user's code
        raise RewardError(f"{what} raised {type(error).__name__}: {error}") from error


def _messages(given: Any, method: str) -> list[Message]:
    """Errors: RewardError unless they are messages with a role and a text."""
    if not isinstance(given, list | tuple) or not given:
        raise RewardError(f"{method} returned {_shown(given)}; expected a list of messages")
    for message in given:
        fine = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fine:
            raise RewardError(f"{method} returned the message {_shown(message)}; expected role and content as texts")
        if message["role"] == "assistant":
            raise RewardError(
                f"{method} returned a message of the assistant, {_shown(message)}: the model speaks there"
            )
    return [dict(message) for message in given]


def _number(given: Any, what: str) -> float:
    if hasattr(given, "item"):  # of numpy or torch
        given = given.item()
    if not isinstance(given, numbers.Real) or not math.isfinite(given):
        raise RewardError(f"{what} {_shown(given)}; expected messages, or a finite number as the reward")
    return float(given)


def _seed(seed: str) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
