"""Generate rows of many turns: between two turns somebody else writes, or says that the row has ended.

A further turn is a new request with all tokens of the row so far, most of which the prefix cache has. Of an engine of
several ranks the first alone asks who answers. One broadcast before each step has the events since the last: which rows
go on and with what. So all ranks add the same requests in the same order, else they would sample wrong tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import PromptBatch
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.errors import OfAnotherRank, RewardError
from hybridflow.rollout.engine import Request, Response, RolloutEngine, response_of
from hybridflow.rollout.rows import EngineCall, Message, ReplicaRows, RowRecord, TurnEvent

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import RequestOutput, SamplingParams

SLOTS = 512  # numbers of the first broadcast: what mostly is enough
HEAD = 6  # numbers of an event before its tokens
FAILED = [-1]  # in place of events
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class TurnCounts:
    """Of this rank since somebody emptied them. seconds: that rows have waited, together; cached: prefix tokens.

    dropped: turns whose answer nobody got.
    """

    turns: int = 0
    dropped: int = 0
    tool_calls: int = 0
    failed_calls: int = 0
    seconds: float = 0.0
    prefix_tokens: int = 0
    cached_tokens: int = 0

    def clear(self) -> None:
        for name in self.names():
            setattr(self, name, 0)

    def names(self) -> list[str]:
        return list(vars(self))

    def values(self) -> list[float]:
        """In the order of the names."""
        return list(vars(self).values())


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


def episodes_of_rows(
    prompts: PromptBatch, counts: Tensor, limits: LengthBuckets[int], seed: Sequence[int]
) -> list[Episode]:
    """Of each row of a rollout, with so many rows of each prompt."""
    found = episodes_of(prompts, limits, seed)
    return [episode for episode, count in zip(found, counts.tolist(), strict=True) for _ in range(count)]


class Answers(Protocol):
    """Who answers the model, on the first rank of an engine replica."""

    def begin(self, rows: ReplicaRows) -> None:
        """A rollout of these rows begins."""

    def admit(self, records: Sequence[RowRecord], episodes: Sequence[Episode]) -> None:
        """Further rows begin."""

    def pause(self) -> None:
        """The engine stops. What the rows have asked for goes on, and what comes of it waits for `resume`."""

    def resume(self) -> None:
        """The engine goes on with the rows. What has passed since `pause` counts for no time limit."""

    def abandon(self) -> None:
        """The rows that are left have no end. Who has begun something for them ends it."""

    def said(self, row: RowRecord, branch: int, turn: Response) -> None:
        """A turn of the model has ended, and the record has it."""

    def work(self, *, wait: bool) -> None:
        """Apply what has happened since to the rows. wait: until there is an event."""

    def end(self) -> None:
        """No row is under way any more."""


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


@dataclass(frozen=True)
class TurnTaking:
    """How the rows of a replica take turns. answers: on its first rank. several: a row may have several sequences."""

    agreement: LeaderBroadcast
    answers: Answers | None
    counts: TurnCounts
    several: bool = False

    def stream(
        self,
        engine: RolloutEngine,
        requests: Sequence[Request],
        of_rollout: Sequence[int],
        params: "Sequence[SamplingParams]",
        *,
        stepped: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, Response]]:
        """(index, response) of each request, in the order in which they end. of_rollout: the rows, by request.

        params: by bucket. stepped: called after each step of the engine.
        """
        rows = ReplicaRows(requests, of_rollout, several=self.several, room=engine.most_rows)
        if self.answers is not None:
            self.agreement.attempt(self.answers.begin, rows)
        left = len(rows)
        while left:
            for event, calls in self.agreed(rows, wait=not engine.is_busy):
                make_calls(engine, calls, params)
                if event.ends:
                    left -= 1
                    yield event.row, rows[event.row].response(event)
            for output in engine.step() if engine.is_busy else ():
                self.take(output, rows)
            stepped()
        if self.answers is not None:
            self.answers.end()
            self.counts.dropped += rows.num_dropped
        engine.wait_until_idle()

    def agreed(self, rows: ReplicaRows, *, wait: bool) -> list[tuple[TurnEvent, list[EngineCall]]]:
        """What has happened, applied on all ranks."""
        if self.answers is not None:
            self.agreement.attempt(self.answers.work, wait=wait)
        own = rows.take_events()
        events = self.agreement.on_all([event for event, _ in own])
        if self.agreement.leads:
            return own
        for event in events:
            rows.apply(event)
        return rows.take_events()

    def take(self, output: "RequestOutput", rows: ReplicaRows) -> None:
        """A turn of the model has ended, unless nobody waits for the turn any more."""
        number, branch, asked = map(int, output.request_id.split("."))
        if number not in rows:
            return  # of a row that has ended while a step was under way
        record, turn = rows[number], response_of(output.outputs[0])
        sequence = record.sequences[branch]
        if not sequence.speaks or asked != sequence.asked:
            return  # of a turn that was dropped while a step was under way
        if sequence.turn > 1:
            self.counts.prefix_tokens += sequence.num_tokens
            self.counts.cached_tokens += output.num_cached_tokens or 0
        rows.hear(number, branch, turn.token_ids, turn.log_probs)
        if sequence.spoken:  # a stop has cut the turn, and the whole of it has ended now
            first = len(sequence.token_ids) - len(turn.token_ids) - sequence.spoken
            turn = replace(turn, token_ids=sequence.token_ids[first:], log_probs=sequence.log_probs[first:])
        if self.answers is not None:
            self.agreement.attempt(self.answers.said, record, branch, turn)


def make_calls(engine: RolloutEngine, calls: Sequence[EngineCall], params: "Sequence[SamplingParams]") -> None:
    """What events ask of the engine. params: by bucket."""
    for name, request, most in calls:
        if request is None:
            engine.abort(name)
        else:
            engine.add(name, request, params[request.bucket], max_tokens=most)
