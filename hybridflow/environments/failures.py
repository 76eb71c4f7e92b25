"""Rows of a rollout that have failed, and what their processes print, as this rank tells them."""

import sys

from hybridflow.config.environment import EnvironmentConfig
from hybridflow.errors import RewardError
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.turns import TurnEvent

MOST_SHOWN = 3  # failures of a rollout that a rank tells in full


class Failures:
    """Of one rollout on this rank."""

    def __init__(self, config: EnvironmentConfig, rank: int) -> None:
        self._config, self._rank, self._number = config, rank, 0

    def reply(self, row: int, number: int, turn: int, problem: str, *, drops: bool = False) -> TurnEvent:
        """The end of a row that has failed. number: of the row in the rollout; turn: in which that was.

        Errors: RewardError where that ends the run.
        """
        told = f"{self._config.field}: row {number}, turn {turn}: {problem}"
        if self._config.on_error == "end_run":
            raise RewardError(f"{told}; data.environment.on_error: fail_row goes on without such a row")
        self._number += 1
        if self._number <= MOST_SHOWN:
            self.show(f"a row has failed, and is not trained on: {told}")
        nothing = (float("nan"),) * len(self._config.weights)
        return TurnEvent(row, ends=True, rewards=nothing, failed=True, drops=drops)

    def end(self) -> None:
        """The rollout is over."""
        if self._number > MOST_SHOWN:
            self.show(f"and {self._number - MOST_SHOWN} more rows have failed")

    def show_printed(self, answer: Answer) -> None:
        for line in answer.printed.splitlines():
            self.show(line)

    def show(self, line: str) -> None:
        print(f"[rank {self._rank}, {self._config.path}] {line}", file=sys.stderr, flush=True)
