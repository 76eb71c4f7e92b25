"""Rows of a rollout that have failed, and what their processes print, as this rank shows them."""

import sys

from hybridflow.config.environment import EnvironmentConfig
from hybridflow.errors import RewardError
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.rows import TurnEvent, TurnRow

MOST_SHOWN = 3  # failures of a rollout that a rank shows in full


class Failures:
    """Of one rollout on this rank."""

    def __init__(self, config: EnvironmentConfig, rank: int) -> None:
        self._config, self._rank, self._number = config, rank, 0

    def event(self, row: TurnRow, problem: str, *, drops: bool = False) -> TurnEvent:
        """The end of a row that has failed. Errors: RewardError where that ends the run."""
        what = f"{self._config.field}: row {row.of_rollout}, turn {row.turn}: {problem}"
        if self._config.on_error == "end_run":
            raise RewardError(f"{what}; data.environment.on_error: fail_row goes on without such a row")
        self._number += 1
        if self._number <= MOST_SHOWN:
            self.show(f"a row has failed, and is not trained on: {what}")
        nothing = (float("nan"),) * len(self._config.weights)
        return TurnEvent(row.number, ends=True, rewards=nothing, failed=True, drops=drops)

    def end(self) -> None:
        """The rollout is over."""
        if self._number > MOST_SHOWN:
            self.show(f"and {self._number - MOST_SHOWN} more rows have failed")

    def show_printed(self, answer: Answer) -> None:
        for line in answer.printed.splitlines():
            self.show(line)

    def show(self, line: str) -> None:
        print(f"[rank {self._rank}, {self._config.path}] {line}", file=sys.stderr, flush=True)
