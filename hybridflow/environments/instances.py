"""The instances of a user's class in a worker process: one a row, called by one message after the other.

    {"kind": "start", "row": 3, "seed": "7,2", "columns": {...}}            -> {"messages": [...]}
    {"kind": "turn", "row": 3, "said": (...), "calls": [...]}               -> {"messages": [...]} or {"reward": [...]}
    {"kind": "step", "row": 3, "said": (...)}                               the same, without tools
    {"kind": "close", "row": 3}                                             -> {}

The model's mistakes become messages of the role `tool`. What the class itself raises is an error of the row. Random
numbers of `random` and numpy begin anew with each call: those of `start` by the columns, since all rows of a prompt
have to begin alike; later ones by the seed, which a group shares, and the number of the call.
"""

import asyncio
import functools
import inspect
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.classes import load_class, tool_names
from hybridflow.environments.model_turn import ModelTurn
from hybridflow.environments.returned import USERS, checked_messages, reward_parts
from hybridflow.errors import RewardError


@dataclass
class Instance:
    """seed: of the row."""

    environment: Any
    seed: str
    num_calls: int = 0


class Instances:
    """Of one worker. path: package.module:Class. arguments: of the class. parts: of the reward, none of numbers."""

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
            first = _called("start", instance.environment.start, asked["columns"])
            return {"messages": checked_messages(first, "start", begins=True)}
        if asked.get("calls"):
            return self._tool_messages(instance.environment, asked["calls"])
        return self._answer(_called("step", instance.environment.step, ModelTurn(*asked["said"])))

    def _closed(self, row: int) -> dict[str, Any]:
        instance = self._there.pop(row, None)
        close = getattr(instance.environment, "close", None) if instance is not None else None
        if close is not None:
            _called("close", close)
        return {}

    def _tool_messages(self, environment: Any, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Of each call the result, or what was wrong."""
        results = [self._tool_result(environment, call) for call in calls]
        messages = [
            {"role": "tool", "name": call["name"], **_id_of(call), "content": content}
            for call, (content, _) in zip(calls, results, strict=True)
        ]
        return {"messages": messages, "failed_calls": sum(failed for _, failed in results)}

    def _tool_result(self, environment: Any, call: Mapping[str, Any]) -> tuple[str, bool]:
        """(text, whether the call failed)."""
        if call["problem"]:
            return f"error: {call['problem']}", True
        if call["name"] not in self._tools:
            known = ", ".join(self._tools) or "none"
            return f"error: there is no tool {call['name']!r}; the tools are {known}", True
        if not isinstance(call["arguments"], dict):
            return f"error: the arguments of {call['name']} are no JSON object", True
        method = getattr(environment, call["name"])
        try:
            result = _awaited(method, method(**call["arguments"]))
            return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False), False
        except USERS as error:  # the model reads what the arguments have done
            return f"error: {type(error).__name__}: {error}", True

    def _answer(self, returned: Any) -> dict[str, Any]:
        if isinstance(returned, list | tuple):
            return {"messages": checked_messages(returned, "step")}
        return {"reward": reward_parts(returned, self._parts, "step returned", "messages, or a finite number")}


def _id_of(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"tool_call_id": call["id"]} if call.get("id") else {}


def _called(what: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return _awaited(function, function(*args, **kwargs))
    except USERS as error:  # the boundary to a user's code
        raise RewardError(f"{what} raised {type(error).__name__}: {error}") from error


def _awaited(method: Any, given: Any) -> Any:
    """The result itself, where a decorator gives something to wait for.

    Errors: TypeError for an `async def` that the decorator shows; `classes` refuses those without one.
    """

    async def result() -> Any:
        return await given

    if not inspect.isawaitable(given):
        return given
    shown = inspect.unwrap(method)
    if inspect.iscoroutine(given) and inspect.iscoroutinefunction(shown):
        given.close()
        raise TypeError(
            f"{shown.__name__} is an `async def` behind a decorator; methods of environments are plain ones"
        )
    return _runner().run(result())


@functools.cache
def _runner() -> asyncio.Runner:
    """Of this process: what a class has opened in one call is there in the next."""
    return asyncio.Runner()


def _seed(seed: str) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
