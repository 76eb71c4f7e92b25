"""Rows of many turns that go on over a weight sync: the engine's turns are cut, and whoever answers the model waits.

    rows = OpenRows(turns, room=engine.most_rows)
    new = {(7, 0): NewRow(request, episode, 14), ...}                       # as on the other ranks of the replica
    ended = rows.ended(engine, params, new, number=4, urgent=set(), version=3)     # until four prompts are answered

A turn that a stop cuts is a segment: the engine reads the row again with the next weights, and goes on with the turn.
An environment's instance and an agent's open request are left as they are between two calls of `ended`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.parallel.platform import preserved_random_state
from hybridflow.rollout.engine import Request, Response, RolloutEngine
from hybridflow.rollout.rows import ReplicaRows
from hybridflow.rollout.turns import Episode, TurnTaking, make_calls

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import SamplingParams

RowKey = tuple[int, int]  # the prompt's position in the run, and the sample


@dataclass(frozen=True)
class NewRow:
    """One that begins. name: a number, for messages and the ids of tool calls."""

    request: Request
    episode: Episode
    name: int


class OpenRows:
    """Of an engine replica, alike on the ranks of the replica; the first has who answers."""

    def __init__(self, turns: TurnTaking, room: int) -> None:
        """turns: of a rollout without rows. room: turns that the engine takes at a time."""
        self._turns, self._rows = turns, ReplicaRows((), (), several=turns.several, room=room)
        self._keys: dict[int, RowKey] = {}  # by number
        self._paused = False
        if turns.answers is not None:
            turns.agreement.attempt(turns.answers.begin, self._rows)

    def __contains__(self, key: RowKey) -> bool:
        return key in self._keys.values()

    @property
    def num_tokens(self) -> int:
        """Behind the prompts of the rows."""
        return sum(len(sequence.token_ids) for record in self._rows.records for sequence in record.sequences)

    def ended(
        self,
        engine: RolloutEngine,
        params: "Sequence[SamplingParams]",
        new: Mapping[RowKey, NewRow],
        *,
        number: int,
        urgent: Set[int],
        version: int,
    ) -> dict[RowKey, Response]:
        """Rows that end until `number` prompts have no row left, the urgent ones among them.

        params: by bucket. new: rows that begin. version: of the actor that the engine has.
        """
        rows, found = self._rows, dict[RowKey, Response]()
        if not number and not urgent:  # else an event of a row that begins would wait for the next call
            return found
        with preserved_random_state():
            self._go_on(engine, params, version)
            self._admit(new)
            left, whole = Counter(position for position, _ in self._keys.values()), set[int]()
            while left.total() and not (len(whole) >= number and urgent <= whole):
                for output in engine.step() if engine.is_busy else ():
                    self._turns.take(output, rows)
                for event, calls in self._turns.agreed(rows, wait=not engine.is_busy):
                    make_calls(engine, calls, params)
                    if event.ends:
                        key = self._keys.pop(event.row)
                        found[key] = rows[event.row].response(event)
                        rows.forget(event.row)
                        left[key[0]] -= 1
                        whole |= set() if left[key[0]] else {key[0]}
            self._stop(engine)
        engine.wait_until_idle()
        return found

    def abandon(self) -> None:
        """No row goes on any more."""
        if self._turns.answers is not None:
            self._turns.answers.abandon()

    def _go_on(self, engine: RolloutEngine, params: "Sequence[SamplingParams]", version: int) -> None:
        if self._paused and self._turns.answers is not None:
            self._turns.agreement.attempt(self._turns.answers.resume)
        self._paused = False
        self._rows.go_on(version)
        for record in self._rows.records:
            make_calls(engine, record.resumed(), params)

    def _admit(self, new: Mapping[RowKey, NewRow]) -> None:
        """Behind what goes on: who answers begins rows at once, by events that all ranks get."""
        records = self._rows.admit([row.request for row in new.values()], [row.name for row in new.values()])
        self._keys |= {record.number: key for record, key in zip(records, new, strict=True)}
        if self._turns.answers is not None:
            episodes = [row.episode for row in new.values()]
            self._turns.agreement.attempt(self._turns.answers.admit, records, episodes)

    def _stop(self, engine: RolloutEngine) -> None:
        """Behind the events of a step, which all ranks have applied."""
        for name, part in engine.abort_all():
            row, branch, _ = map(int, name.split("."))
            self._rows.cut(row, branch, part.token_ids, part.log_probs)
        answers, self._paused = self._turns.answers, True
        if answers is not None:
            answers.pause()
            self._turns.counts.dropped += self._rows.num_dropped
        self._rows.num_dropped = 0
