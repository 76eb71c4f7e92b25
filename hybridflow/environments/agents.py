"""A user's agent: finding it and checking it, and running it in a worker process, a row beside many others.

    async def run(base_url, row): ...           # and by keyword what data.environment.arguments gives

It is found and checked in a process that ends, as `environments.classes` says. In a worker `AgentRuns` gets messages:

    {"kind": "ready", "row": 0}                                                                     -> {}
    {"kind": "run", "row": 3, "base_url": "http://127.0.0.1:4711/3-8f.../v1", "columns": {...}}     -> {"reward": [...]}
    {"kind": "end", "row": 3}                                                                       -> {}
"""

import asyncio
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.environments.returned import USERS, reward_parts
from hybridflow.errors import ConfigError, RewardError, UserCodeError
from hybridflow.rewards.functions import is_async
from hybridflow.rewards.probe import asked, serve
from hybridflow.user_code import load_function

KEY = "data.environment.agent"
END_SECONDS = 5.0  # in which an agent may end once the row has
PREPARE = "hybridflow_prepare"  # an attribute of our own agents: what they do before their first row


def agent_file(path: str, arguments: Mapping[str, Any]) -> str | None:
    """The file of the agent's module. Errors: ConfigError where there is no such agent."""
    [found] = asked("hybridflow.environments.agents", [[path, dict(arguments)]], f"{KEY} = {path}")
    if found["problem"]:
        raise ConfigError(found["problem"])
    file: str | None = found["file"]
    return file


def load_agent(path: str, arguments: Mapping[str, Any]) -> Any:
    """Errors: ConfigError where there is none, or a run cannot call it."""
    try:
        found: Any = load_function(path, KEY)
    except UserCodeError as error:
        raise ConfigError(str(error)) from error
    if not is_async(found):
        raise ConfigError(f"{KEY} = {path}: is no `async def`; an agent is `async def run(base_url, row)`")
    try:
        inspect.signature(found).bind(None, None, **arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "none"
        raise ConfigError(
            f"{KEY} = {path}: is called as run(base_url, row) with data.environment.arguments, here {given}: {error}; "
            f"its signature is {inspect.signature(found)}"
        ) from error
    return found


def main(parent: int) -> None:
    """The process. See `rewards.probe`."""
    serve(parent, _told)


def _told(path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = load_agent(path, arguments)
    except ConfigError as error:
        return {"problem": str(error)}
    module = sys.modules[getattr(found, "__module__", None) or path.partition(":")[0]]
    return {"problem": "", "file": getattr(module, "__file__", None)}


class AgentRuns:
    """Of one worker. path: package.module:function. arguments: by keyword. parts: of the reward, none of numbers."""

    def __init__(self, path: str, arguments: Mapping[str, Any], parts: Sequence[str]) -> None:
        self._run, self._arguments, self._parts = load_agent(path, arguments), dict(arguments), tuple(parts)
        self._there: dict[int, tuple[asyncio.Task[Any], asyncio.Event]] = {}
        self._left = set[asyncio.Task[Any]]()  # a task that nobody refers to may go before it ends

    async def __call__(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """See the module. Errors: RewardError that says what the agent did."""
        row = asked["row"]
        if asked["kind"] == "ready":
            if (prepare := getattr(self._run, PREPARE, None)) is not None:
                await prepare(**self._arguments)
            return {}
        if asked["kind"] == "end":
            await self._cancel(row)
            return {}
        task = asyncio.ensure_future(self._run(asked["base_url"], dict(asked["columns"]), **self._arguments))
        given_up = asyncio.ensure_future((event := asyncio.Event()).wait())
        self._there[row] = task, event
        try:
            await asyncio.wait({task, given_up}, return_when=asyncio.FIRST_COMPLETED)
            return {"reward": self._reward(task)} if task.done() else {}
        finally:
            given_up.cancel()
            del self._there[row]

    async def _cancel(self, row: int) -> None:
        """The row needs the agent no longer. One that goes on all the same harms no other row: nobody waits for it."""
        task, given_up = self._there.get(row, (None, None))
        if task is None or given_up is None:
            return
        task.cancel()
        await asyncio.wait({task}, timeout=END_SECONDS)
        if not task.done():
            print(f"an agent goes on {END_SECONDS:g} s after its row has ended, and is left alone", flush=True)
            self._left.add(task)
            task.add_done_callback(self._left.discard)
            given_up.set()

    def _reward(self, task: "asyncio.Task[Any]") -> list[float]:
        try:
            returned = task.result()
        except (*USERS, asyncio.CancelledError) as error:  # the boundary to a user's code
            raise RewardError(f"the agent raised {type(error).__name__}: {error}") from error
        return reward_parts(returned, self._parts, "the agent returned", "a finite number")
