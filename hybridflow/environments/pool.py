"""Environments of this rank in worker processes, as the trainer calls them. See `rewards.pool` and `instances`.

pool = EnvironmentPool(config, described(config.path, config.arguments), scoring, num_ranks=2)
first = pool.first_messages([{"question": "1+1"}])
row = pool.start({"question": "1+1"}, seed="1,0")           # and then pool.call(row, ...), pool.answers(...)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.config.environment import EnvironmentConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.environments.classes import DescribedClass, field_of
from hybridflow.rewards.functions import FunctionSpec
from hybridflow.rewards.pool import Answer, Pool
from hybridflow.rewards.specs import pool_limits


class EnvironmentPool(Pool):
    """Of one class. schemas: of its tools. file: of its module. field: what messages call it."""

    def __init__(
        self, config: EnvironmentConfig, found: DescribedClass, scoring: ScoringConfig, *, num_ranks: int
    ) -> None:
        """num_ranks: on this machine, which share its cores."""
        self.config, self.schemas, self.file = config, found.schemas, found.file
        self.field = field_of(config.path)
        self._num_rows, self._closing = 0, set[int]()  # tickets of the last calls of rows
        limits = pool_limits(scoring.model_copy(update={"num_workers": config.num_workers}), num_ranks)
        super().__init__([_spec(config, found)], limits)

    def start(self, columns: Mapping[str, Any], *, seed: str) -> tuple[int, int]:
        """A new row and the ticket of its first call, whose answer is the row's first messages."""
        row, self._num_rows = self._num_rows, self._num_rows + 1
        return row, self.call(row, {"kind": "start", "row": row, "seed": seed, "columns": dict(columns)})

    def first_messages(self, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """What rows with these columns begin with, by instances that end again. Nothing else may be under way."""
        begun = [self.start(columns, seed="") for columns in rows]
        found: dict[int, Answer] = {}
        while not all(ticket in found for _, ticket in begun):
            found |= self.answers(None)
        for row, _ in begun:
            self.finish(row)
        return [found[ticket] for _, ticket in begun]

    def finish(self, row: int) -> None:
        """End it, behind the calls that are under way; its instance is closed."""
        self._closing.add(self.call(row, {"kind": "close", "row": row}, last=True))

    def answers(self, seconds: float | None) -> dict[int, Answer]:
        """As `Pool.answers`; without those of rows that end."""
        found = super().answers(seconds)
        ended = self._closing & found.keys()
        self._closing -= ended
        return {ticket: answer for ticket, answer in found.items() if ticket not in ended}


def _spec(config: EnvironmentConfig, found: DescribedClass) -> FunctionSpec:
    arguments = {"path": config.path, "arguments": config.arguments, "parts": list(config.parts)}
    return FunctionSpec(
        path="hybridflow.environments.instances:Instances",
        file=found.file,
        arguments=arguments,
        parts=(),
        per="row",
        timeout_seconds=config.call_seconds,
        awaited=False,
        concurrency=1,
        background=False,
        affine=True,
    )
