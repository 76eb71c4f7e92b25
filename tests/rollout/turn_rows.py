"""Rows of a rollout without an engine: who answers is driven by hand, as `TurnTaking.stream` does it."""

from collections.abc import Sequence

from hybridflow.rollout.engine import Request, Response
from hybridflow.rollout.rows import ReplicaRows, TurnEvent
from hybridflow.rollout.turns import Answers


class DrivenRows:
    """prompts: tokens of each row's prompt."""

    def __init__(
        self, answers: Answers, prompts: Sequence[Sequence[int]], *, several: bool = False, room: int = 1 << 30
    ):
        requests = [Request(list(ids), seed=row) for row, ids in enumerate(prompts)]
        self.answers, self.rows = answers, ReplicaRows(requests, range(len(requests)), several=several, room=room)
        answers.begin(self.rows)

    def events(self, *, wait: bool) -> list[TurnEvent]:
        self.answers.work(wait=wait)
        return [event for event, _ in self.rows.take_events()]

    def said(self, row: int, token_ids: Sequence[int], *, truncated: bool, branch: int = 0) -> None:
        """A turn of the model, each token with a log-prob of -0.5."""
        self.say(row, Response(list(token_ids), [-0.5] * len(token_ids), truncated), branch)

    def say(self, row: int, turn: Response, branch: int = 0) -> None:
        self.rows.hear(row, branch, turn.token_ids, turn.log_probs)
        self.answers.said(self.rows[row], branch, turn)
