"""How long rows of a rollout may take."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from hybridflow.config.environment import EnvironmentConfig
from hybridflow.rollout.rows import TurnRow

KEY = "data.environment"
MOST_STARTS = 3  # of a row whose process ends before anything of the model was heard there
LOOK_SECONDS = 0.1  # between two looks at the limits of rows


@dataclass
class TimeLimits:
    """Of one rollout, which begins when this is made. Each tells why something has taken too long; nothing else.

    paused: since when the engine does something else.
    """

    config: EnvironmentConfig
    begun: float = field(default_factory=time.monotonic)
    looked: float = 0.0
    paused: float = 0.0

    def pause(self) -> None:
        self.paused = time.monotonic()

    def resume(self, rows: Iterable[TurnRow]) -> None:
        """The next part of partial rollouts begins. What has passed since `pause` is no time of the rows."""
        self.begun = time.monotonic()
        for row in rows:
            row.begun += self.begun - self.paused
            if row.waiting_since is not None:
                row.waiting_since += self.begun - self.paused

    def are_due(self) -> bool:
        """Whether nobody has looked at the limits for a while; now somebody does."""
        due = time.monotonic() >= self.looked + LOOK_SECONDS
        self.looked = time.monotonic() if due else self.looked
        return due

    def rollout(self) -> str:
        """Of all rows that have not ended."""
        limit = self.config.rollout_seconds
        return "" if limit is None else _late(self.begun, limit, f"had not ended after {KEY}.rollout_seconds")

    def row(self, begun: float) -> str:
        """Of a row that has begun then, on the clock."""
        limit = self.config.row_seconds
        return "" if limit is None else _late(begun, limit, f"took longer than {KEY}.row_seconds")

    def request(self, expected: float) -> str:
        """Of an agent that has been expected to ask, or to end, since then."""
        late = _late(expected, self.config.call_seconds, f"took longer than {KEY}.call_seconds")
        return late and f"{late} without a request or a reward"


def _late(begun: float, limit: float, what: str) -> str:
    return f"{what} = {limit:g}" if time.monotonic() > begun + limit else ""
