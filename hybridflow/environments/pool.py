"""Environments and agents of this rank in worker processes, as the trainer calls them. See `rewards.pool`.

pool = EnvironmentPool(config, described(config.path, config.arguments), scoring, num_ranks=2)
first = pool.first_messages([{"question": "1+1"}])
row = pool.start({"question": "1+1"}, seed="1,0")           # and then pool.call(row, ...), pool.answers(...)

agents = AgentPool(config, agent_file(config.path, config.arguments), scoring, num_ranks=2)
row, ticket = agents.run("http://127.0.0.1:4711/...", {"question": "1+1"})
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridflow.config.environment import EnvironmentConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.environments.agents import END_SECONDS
from hybridflow.environments.classes import DescribedClass
from hybridflow.errors import RewardError
from hybridflow.parallel.proxies import keep_loopback_direct
from hybridflow.rewards.functions import FunctionSpec
from hybridflow.rewards.pool import Answer, Pool
from hybridflow.rewards.specs import pool_limits

START_SECONDS = 300.0  # in which a process may import what its agents need
FINISH_SECONDS = 10.0  # in which what is left at the end of a run may end


class RowPool(Pool):
    """Calls of rows that have a beginning and an end. file: of the user's module. field: what messages call it."""

    def __init__(
        self, config: EnvironmentConfig, file: str | None, spec: FunctionSpec, scoring: ScoringConfig, num_ranks: int
    ) -> None:
        """num_ranks: on this machine, which share its cores."""
        self.config, self.file, self.field = config, file, config.field
        self._num_rows, self._closing = 0, set[int]()  # tickets of the last calls of rows
        self._kept: dict[int, Answer | None] = {}  # by ticket, of calls whose answers nobody waits for yet
        limits = pool_limits(scoring.model_copy(update={"num_workers": config.num_workers}), num_ranks)
        self.num_workers = limits.num_workers
        super().__init__([spec], limits)

    @property
    def most_at_once(self) -> int:
        """Rows that may be under way beside each other; whoever calls keeps to it."""
        return self.num_workers * self.config.concurrency

    def answers(self, seconds: float | None) -> dict[int, Answer]:
        """As `Pool.answers`; of the last calls of rows only those with something printed."""
        found = super().answers(seconds)
        ended = self._closing & found.keys()
        self._closing -= ended
        for ticket in self._kept.keys() & found.keys():
            self._kept[ticket] = found.pop(ticket)
        return {ticket: answer for ticket, answer in found.items() if ticket not in ended or answer.printed}

    def set_aside(self, tickets: Iterable[int]) -> None:
        """Whoever waits for these answers does not ask for a while: nobody else gets them."""
        self._kept |= dict.fromkeys(tickets)

    def take_back(self, tickets: Iterable[int]) -> None:
        """`answers` has those that have come since, and those that come."""
        found = {ticket: self._kept.pop(ticket) for ticket in tickets}
        self._answers |= {ticket: answer for ticket, answer in found.items() if answer is not None}

    def finish_all(self, rows: Iterable[int | None]) -> None:
        """End these rows, and wait a little until their processes have done so: nothing else is asked."""
        until = time.monotonic() + FINISH_SECONDS
        for row in rows:
            if row is not None:
                self.finish(row)
        while self._closing and (left := until - time.monotonic()) > 0:
            self.answers(left)

    def _begun(self, message: Mapping[str, Any], seconds: float | None = None) -> tuple[int, int]:
        """A new row and the ticket of the first call."""
        row, self._num_rows = self._num_rows, self._num_rows + 1
        return row, self.call(row, {**message, "row": row}, seconds=seconds)

    def _all_answers(self, begun: Sequence[tuple[int, int]], early: Mapping[int, Answer] | None = None) -> list[Answer]:
        """Of rows that end then. No other call may be under way. early: answers that are there."""
        found = dict(early or {})
        while not all(ticket in found for _, ticket in begun):
            found |= self.answers(None)
        for row, _ in begun:
            self.finish(row)
        return [found[ticket] for _, ticket in begun]

    def finish(self, row: int) -> None:
        """The last call of a row."""
        raise NotImplementedError

    def _end(self, row: int, kind: str, seconds: float | None = None) -> None:
        self._closing.add(self.call(row, {"kind": kind, "row": row}, last=True, seconds=seconds))


class EnvironmentPool(RowPool):
    """Of one class. schemas: of the tools."""

    def __init__(
        self, config: EnvironmentConfig, found: DescribedClass, scoring: ScoringConfig, *, num_ranks: int
    ) -> None:
        """num_ranks: on this machine, which share its cores."""
        self.schemas = found.schemas
        self._ahead: dict[str, tuple[int, int]] = {}  # row and ticket of an instance, by the columns
        super().__init__(config, found.file, _spec(config, found.file), scoring, num_ranks)

    def start(self, columns: Mapping[str, Any], *, seed: str) -> tuple[int, int]:
        """A new row and the ticket of the first call, whose answer is the row's first messages."""
        return self._begun({"kind": "start", "seed": seed, "columns": dict(columns)})

    def start_ahead(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Instances for the next `first_messages`, while this rank does something else; earlier ones end."""
        self._end_ahead()
        for columns in rows:
            if (name := name_of(columns)) not in self._ahead:
                self._ahead[name] = self.start(columns, seed="")
                self._kept[self._ahead[name][1]] = None

    def first_messages(self, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """What rows with these columns begin with, by instances that end again. No other call may be under way."""
        begun = [
            self._ahead.pop(name) if (name := name_of(columns)) in self._ahead else self.start(columns, seed="")
            for columns in rows
        ]
        early = {ticket: answer for _, ticket in begun if (answer := self._kept.pop(ticket, None)) is not None}
        found = self._all_answers(begun, early)
        self._end_ahead()
        return found

    def _end_ahead(self) -> None:
        for row, ticket in self._ahead.values():
            self._kept.pop(ticket, None)
            self.finish(row)
        self._ahead.clear()

    def finish(self, row: int) -> None:
        """End it, behind the calls that are under way; the instance is closed."""
        self._end(row, "close")


class AgentPool(RowPool):
    """Of one agent."""

    def __init__(self, config: EnvironmentConfig, file: str | None, scoring: ScoringConfig, *, num_ranks: int) -> None:
        """num_ranks: on this machine, which share its cores."""
        keep_loopback_direct(config.listen)
        super().__init__(config, file, _spec(config, file), scoring, num_ranks)
        self._started = False

    def start_processes(self) -> list[Answer]:
        """Returns when all of them have imported what their agents need: that is no row's time.

        What each of them has printed, the first time. Errors: RewardError where one does not get so far.
        """
        if self._started:
            return []
        self._started = True
        begun = [self._begun({"kind": "ready"}, START_SECONDS) for _ in range(self.num_workers)]
        answers = self._all_answers(begun)
        problems = [answer.problem for answer in answers if answer.problem]
        if problems:
            raise RewardError(f"{self.field}: a process for agents does not start: {problems[0]}")
        return answers

    def run(self, base_url: str, columns: Mapping[str, Any]) -> tuple[int, int]:
        """A new row and the ticket of the agent's reward."""
        return self._begun({"kind": "run", "base_url": base_url, "columns": dict(columns)})

    def finish(self, row: int) -> None:
        """End it. An agent that still runs is cancelled, and left alone where it goes on all the same."""
        self._end(row, "end", END_SECONDS + self.config.call_seconds)


def name_of(columns: Mapping[str, Any]) -> str:
    """The same for equal columns, on all ranks."""
    return json.dumps(dict(columns), sort_keys=True, default=str)


def _spec(config: EnvironmentConfig, file: str | None) -> FunctionSpec:
    """Rows of an agent have limits that the rank keeps, which knows what they wait for."""
    is_agent = config.is_agent
    own = "agents:AgentRuns" if is_agent else "instances:Instances"
    return FunctionSpec(
        path=f"hybridflow.environments.{own}",
        file=file,
        arguments={"path": config.path, "arguments": config.called_with, "parts": list(config.parts)},
        parts=(),
        per="row",
        timeout_seconds=math.inf if is_agent else config.call_seconds,
        awaited=is_agent,
        # with the calls that end rows, and rows that wait while others are evaluated
        concurrency=3 * config.concurrency if is_agent else 1,
        background=False,
        affine=True,
    )
