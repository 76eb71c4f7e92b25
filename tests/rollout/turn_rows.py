"""Rows of a rollout without an engine: who answers is driven by hand, as `TurnTaking.stream` does it."""

from collections.abc import Sequence

from hybridflow.batch import PromptBatch
from hybridflow.config.length_buckets import always
from hybridflow.rollout.engine import Request
from hybridflow.rollout.row import CUT, ENDED, RolloutRow
from hybridflow.rollout.rows import ReplicaRows, TurnEvent
from hybridflow.rollout.turns import EnvironmentRows, episodes_of


class DrivenRows:
    """So many rows of one prompt. limit: tokens behind the prompt."""

    def __init__(
        self, shared: EnvironmentRows, prompt: PromptBatch, count: int, limit: int, *, room: int = 1 << 30
    ) -> None:
        [ids], [episode] = prompt.token_lists(), episodes_of(prompt, always(limit), (1,))
        self.rows = ReplicaRows(several=shared.several, room=room)
        self.answers = shared.answers(self.rows)
        records = self.rows.admit([Request(ids, seed=row) for row in range(count)], range(count))
        self.answers.admit(records, [episode] * count)

    def events(self, *, wait: bool) -> list[TurnEvent]:
        self.answers.work(wait=wait)
        return [event for event, _ in self.rows.take_events()]

    def said(self, row: int, token_ids: Sequence[int], *, truncated: bool, branch: int = 0) -> None:
        """A turn of the model, each token with a log-prob of -0.5."""
        self.say(row, RolloutRow(list(token_ids), [-0.5] * len(token_ids), state=CUT if truncated else ENDED), branch)

    def say(self, row: int, turn: RolloutRow, branch: int = 0) -> None:
        self.rows.hear(row, branch, turn.token_ids, turn.log_probs)
        self.answers.on_turn_end(self.rows[row], branch, turn)
