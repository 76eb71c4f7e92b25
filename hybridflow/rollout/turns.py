"""Generate rows of many turns: between two turns somebody else writes, or says that the row has ended.

    turns = TurnTaking(environments, agreement, room=engine.most_rows)
    for index, row in turns.stream(engine, new, params): ...                     # a rollout, or until four prompts
    ended = turns.until_whole(engine, params, new, number=4, urgent=set(), version=3)    # are answered

A further turn is a new request with all tokens of the row so far, most of which the prefix cache has. Of an engine of
several ranks the first alone asks who answers. One broadcast before each step has the events since the last: which rows
go on and with what. So all ranks add the same requests in the same order, else they would sample wrong tokens.

Rows of a partial rollout go on over a weight sync. A turn that a stop cuts is a segment: the engine reads the row again
with the next weights, and goes on with the turn. An environment's instance and an agent's open request are left as they
are between two calls of `until_whole`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from hybridflow.batch import PromptBatch
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.errors import OfAnotherRank, RewardError
from hybridflow.parallel.platform import preserved_random_state
from hybridflow.rollout.engine import Request, RolloutEngine
from hybridflow.rollout.row import RolloutRow
from hybridflow.rollout.rows import EngineCall, Message, ReplicaRows, TurnCounts, TurnEvent, TurnRow

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import RequestOutput, SamplingParams

SLOTS = 512  # numbers of the first broadcast: what mostly is enough
HEAD = 6  # numbers of an event before its tokens
FAILED = [-1]  # in place of events
RowKey = tuple[int, int]  # the prompt's position in the run, and the sample
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Episode:
    """What a row begins with. messages: None where an agent brings them. limit: tokens behind the prompt.

    seed: which the rows of a prompt share.
    """

    columns: Mapping[str, Any]
    messages: list[Message] | None
    limit: int
    seed: str


def episodes_of(prompts: PromptBatch, limits: LengthBuckets[int], seed: Sequence[int]) -> list[Episode]:
    """Of each prompt. seed: of the generation."""
    conversations = prompts.conversations or (None,) * len(prompts)
    return [
        Episode(
            {name: values[number] for name, values in prompts.columns.items()},
            conversations[number],
            limits.for_length(length),
            ",".join(map(str, (*seed, number))),
        )
        for number, length in enumerate(prompts.lengths.tolist())
    ]


@dataclass(frozen=True)
class NewRow:
    """One that begins. name: a number, for messages and the ids of tool calls."""

    request: Request
    episode: Episode
    name: int


class Answers(Protocol):
    """Who answers the model, on the first rank of an engine replica."""

    def admit(self, records: Sequence[TurnRow], episodes: Sequence[Episode]) -> None:
        """These rows begin."""

    def pause(self) -> None:
        """The engine stops. What the rows have asked for goes on, and what comes of it waits for `resume`."""

    def resume(self) -> None:
        """The engine goes on with the rows. What has passed since `pause` counts for no time limit."""

    def abandon(self) -> None:
        """The rows that are left have no end. Who has begun something for them ends it."""

    def on_turn_end(self, row: TurnRow, branch: int, turn: RolloutRow) -> None:
        """A turn of the model has ended, and the record has it."""

    def work(self, *, wait: bool) -> None:
        """Apply what has happened since to the rows. wait: until there is an event."""

    def end(self) -> None:
        """No row is under way any more."""


class EnvironmentRows(Protocol):
    """Who makes the answers to rows. counts: of this rank. num_rewards: parts that a row is given.

    several: a row may have several sequences.
    """

    @property
    def counts(self) -> TurnCounts: ...

    @property
    def num_rewards(self) -> int: ...

    @property
    def several(self) -> bool: ...

    def answers(self, rows: ReplicaRows) -> Answers: ...


class LeaderBroadcast:
    """Of the ranks of an engine replica: the first one's list of events, on all of them."""

    def __init__(self, group: dist.ProcessGroup | None, leader: int) -> None:
        """group: of the replica; None of one rank. leader: its first rank."""
        self._group, self._leader = group, leader
        self._failure: RewardError | None = None
        self.leads = group is None or dist.get_rank() == leader

    def attempt(self, act: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """What the first rank does for all. The next `on_all` raises a RewardError on all ranks; until then no more."""
        if self._failure is None:
            try:
                return act(*arguments, **named)
            except RewardError as error:
                error.of_replica = True
                self._failure = error
        return None

    def on_all(self, events: Sequence[TurnEvent]) -> list[TurnEvent]:
        """Those of the first rank, which alone has rewards. Errors: RewardError there, OfAnotherRank elsewhere."""
        numbers = FAILED if self._failure is not None else _packed(events)
        if self._group is not None:
            numbers = self._broadcast(numbers)
        if numbers == FAILED:
            other = OfAnotherRank("what answers the model has failed on the first rank of the replica")
            other.of_replica = True
            raise self._failure or other
        return list(events) if self.leads else _unpacked(numbers)

    def _broadcast(self, numbers: list[int]) -> list[int]:
        """[how many, ...], of which a second broadcast has what the first has no room for."""
        room = SLOTS - 1
        first = self._sent([len(numbers), *numbers[:room], *[0] * (room - len(numbers))])
        size, found = first[0], first[1:]
        if size > room:
            found += self._sent(numbers[room:] if self.leads else [0] * (size - room))
        return found[:size]

    def _sent(self, numbers: list[int]) -> list[int]:
        # in host memory: on a GPU each step of the engine would wait for the step before
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(tensor, src=self._leader, group=self._group)
        return [int(number) for number in tensor.tolist()]


def _packed(events: Sequence[TurnEvent]) -> list[int]:
    return [
        number
        for event in events
        for number in (
            event.row,
            event.branch,
            event.max_tokens,
            int(event.ends),
            int(event.truncated) + 2 * int(event.failed) + 4 * int(event.drops),
            len(event.token_ids),
            *event.token_ids,
        )
    ]


def _unpacked(numbers: list[int]) -> list[TurnEvent]:
    found, at = [], 0
    while at < len(numbers):
        row, branch, most, ends, how, size = numbers[at : at + HEAD]
        ids = tuple(numbers[at + HEAD : at + HEAD + size])
        event = TurnEvent(row, ids, most, bool(ends), bool(how & 1), failed=bool(how & 2), drops=bool(how & 4))
        found.append(replace(event, branch=branch))
        at += HEAD + size
    return found


class TurnTaking:
    """Of the rows of an engine replica, alike on its ranks; the first has who answers. room: turns at a time."""

    def __init__(self, environments: EnvironmentRows, agreement: LeaderBroadcast, *, room: int) -> None:
        self._rows, self._counts = ReplicaRows(several=environments.several, room=room), environments.counts
        self._agreement, self._paused = agreement, False
        self._keys: dict[int, RowKey] = {}  # by number, of partial rollouts
        self._names: dict[str, str] = {}  # the engine's own of a request, by ours
        self._answers = agreement.attempt(environments.answers, self._rows) if agreement.leads else None

    def stream(
        self,
        engine: RolloutEngine,
        new: Sequence[NewRow],
        params: "Sequence[SamplingParams]",
        *,
        stepped: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, RolloutRow]]:
        """(index, row) of each row, in the order in which they end.

        params: by bucket. stepped: called after each step of the engine.
        """
        self._admit(new)
        while len(self._rows):
            yield from self._step(engine, params)
            stepped()
        if self._answers is not None:
            self._answers.end()
        self._count_dropped()
        engine.wait_until_idle()

    def until_whole(
        self,
        engine: RolloutEngine,
        params: "Sequence[SamplingParams]",
        new: Mapping[RowKey, NewRow],
        *,
        number: int,
        urgent: Set[int],
        version: int,
    ) -> dict[RowKey, RolloutRow]:
        """Rows that end until `number` prompts have no row left, the urgent ones among them.

        params: by bucket. new: rows that begin. version: of the actor that the engine has.
        """
        found = dict[RowKey, RolloutRow]()
        if not number and not urgent:  # else an event of a row that begins would wait for the next call
            return found
        with preserved_random_state():
            self._go_on(engine, params, version)
            numbers = [record.number for record in self._admit(list(new.values()))]
            self._keys |= dict(zip(numbers, new, strict=True))
            left, whole = Counter(position for position, _ in self._keys.values()), set[int]()
            while left.total() and not (len(whole) >= number and urgent <= whole):
                for row, ended in self._step(engine, params):
                    found[key := self._keys.pop(row)] = ended
                    left[key[0]] -= 1
                    whole |= set() if left[key[0]] else {key[0]}
            self._stop(engine)
        engine.wait_until_idle()
        return found

    @property
    def open_rows(self) -> Set[RowKey]:
        """Those that go on in a further call."""
        return set(self._keys.values())

    @property
    def num_open_tokens(self) -> int:
        """Behind the prompts of the rows, on the rank that asks for the turns."""
        written = (sequence for record in self._rows.records for sequence in record.branches)
        return sum(len(sequence.token_ids) for sequence in written) if self._agreement.leads else 0

    def abandon(self) -> None:
        """No row goes on any more."""
        if self._answers is not None:
            self._answers.abandon()

    def _admit(self, new: Sequence[NewRow]) -> list[TurnRow]:
        """Behind what goes on: who answers begins rows at once, by events that all ranks get."""
        records = self._rows.admit([row.request for row in new], [row.name for row in new])
        if self._answers is not None:
            self._agreement.attempt(self._answers.admit, records, [row.episode for row in new])
        return records

    def _step(self, engine: RolloutEngine, params: "Sequence[SamplingParams]") -> list[tuple[int, RolloutRow]]:
        """A step of the engine, and what has happened since the step before: rows that have ended, by number."""
        for output in engine.step() if engine.is_busy else ():
            self._take(output, engine)
        ended = []
        for event, calls in self._agreed(wait=not engine.is_busy):
            self._call(engine, calls, params)
            if event.ends:
                ended.append((event.row, self._rows[event.row].finished_row(event)))
                self._rows.forget(event.row)
        return ended

    def _agreed(self, *, wait: bool) -> list[tuple[TurnEvent, list[EngineCall]]]:
        """What has happened, applied on all ranks."""
        if self._answers is not None:
            self._agreement.attempt(self._answers.work, wait=wait)
        own = self._rows.take_events()
        events = self._agreement.on_all([event for event, _ in own])
        if self._agreement.leads:
            return own
        for event in events:
            self._rows.apply(event)
        return self._rows.take_events()

    def _take(self, output: "RequestOutput", engine: RolloutEngine) -> None:
        """A turn of the model has ended, unless nobody waits for the turn any more."""
        number, branch, asked = map(int, output.request_id.split("."))
        if number not in self._rows:
            return  # of a row that has ended while a step was under way
        record = self._rows[number]
        sequence = record.branches[branch]
        if not sequence.speaks or asked != sequence.num_requests:
            return  # of a turn that was dropped while a step was under way
        if sequence.turn > 1:
            self._counts.prefix_tokens += sequence.num_tokens
            self._counts.cached_tokens += output.num_cached_tokens or 0
        turn = engine.response(output.outputs[0], sequence.num_tokens, self._names.pop(output.request_id))
        self._rows.hear(number, branch, turn.token_ids, turn.log_probs, turn.experts)
        if sequence.num_generated:  # a stop has cut the turn, and the whole of it has ended now
            first = len(sequence.token_ids) - len(turn.token_ids) - sequence.num_generated
            turn = RolloutRow(sequence.token_ids[first:], sequence.log_probs[first:], state=turn.state)
        if self._answers is not None:
            self._agreement.attempt(self._answers.on_turn_end, record, branch, turn)

    def _call(self, engine: RolloutEngine, calls: Sequence[EngineCall], params: "Sequence[SamplingParams]") -> None:
        """What events ask of the engine. params: by bucket."""
        for name, request, most in calls:
            if request is None:
                self._names.pop(name, None)
                engine.abort(name)
            else:
                self._names[name] = engine.add(name, request, params[request.bucket], max_tokens=most)

    def _go_on(self, engine: RolloutEngine, params: "Sequence[SamplingParams]", version: int) -> None:
        if self._paused and self._answers is not None:
            self._agreement.attempt(self._answers.resume)
        self._paused = False
        self._rows.go_on(version)
        for record in self._rows.records:
            self._call(engine, record.resumed(), params)

    def _stop(self, engine: RolloutEngine) -> None:
        """Behind the events of a step, which all ranks have applied."""
        for name, part in engine.abort_all():
            row, branch, _ = map(int, name.split("."))
            self._rows[row].hear(branch, part.token_ids, part.log_probs, experts=part.experts, ends=False)
        self._names.clear()
        self._paused = True
        if self._answers is not None:
            self._answers.pause()
        self._count_dropped()

    def _count_dropped(self) -> None:
        """On the rank that asks for the turns."""
        self._counts.dropped += self._rows.num_dropped if self._answers is not None else 0
        self._rows.num_dropped = 0
