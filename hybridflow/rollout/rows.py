"""A row of a rollout of many turns, from its prompt to its reward: one record for classes, agents and verifiers.

    rows = ReplicaRows(several=False)
    rows.admit(requests, of_rollout)
    rows.apply(TurnEvent(0, max_tokens=9))              # the model's next turn: `take_events` gives the EngineCall
    rows.hear(0, 0, [5, 6], [-0.1, -0.2])               # row, branch, and what the model has generated
    rows.apply(TurnEvent(0, (7, 8), max_tokens=7))      # tokens of an answer; the model speaks again
    rows.apply(TurnEvent(0, ends=True, rewards=(1.0,)))

Each rank of an engine replica has the records, and applies the same events in the same order. The first rank applies an
event when it happens (`Answers` of `rollout.turns`); it alone has the conversation beside the tokens.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout.engine import Request
from hybridflow.rollout.row import CUT, ENDED, SAMPLED, RolloutRow, Written

Message = dict[str, Any]


@dataclass(frozen=True)
class TurnEvent:
    """What happens to a row between two turns: tokens behind a turn and how many the next may have, or the row's end.

    token_ids: behind the turn, also where the row ends. truncated: the row has ended at a limit. rewards: NaN of a row
    that has failed. failed: none of the row's tokens counts.
    drops: the branch's last turn, and what was written right before that turn, go. The engine may still be at that
    turn. Where the row ends: of each branch that the engine is at.
    branch: of the row, 0 the row's first sequence. The number after the last one begins another branch, whose first
    tokens are all that the model reads there.
    """

    row: int
    token_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    ends: bool = False
    truncated: bool = False
    rewards: tuple[float, ...] = ()
    failed: bool = False
    drops: bool = False
    branch: int = 0


class EngineCall(NamedTuple):
    """request: to begin, with so many tokens at most; None: the request of this name is aborted."""

    name: str
    request: Request | None = None
    max_tokens: int = 0


@dataclass(frozen=True)
class Transcript:
    """What a sequence says, beside the tokens. messages: None before an agent's first request, and with token ids.

    fields: that enter the chat template. ended: the token by which the model has ended the last turn. cut: that turn
    has met a limit. answered: the model has spoken.
    """

    messages: list[Message] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    ended: int | None = None
    cut: bool = False
    answered: bool = False


@dataclass
class Branch(Written):
    """A sequence of a row that the engine reads by itself. prompt: the row's, of the first; a further one has none.

    turn: number of the last turn, without dropped turns; num_requests: with dropped turns. speaks: the engine generates
    the last turn. kept: the number of tokens that `drop` leaves. seed_key: digest of the tokens that the turn was
    requested with, and the number of this request among equal ones.
    opening: tokens that count as prompt for a limit: the row's, or those of the first request.
    seed, most: seed and token limit of the last turn. calls: how often the engine was stopped in that turn.
    num_generated: tokens of the turn at the last stop.
    transcript, before: the transcript now, and the one that `drop` restores.
    experts: that the engine of this rank has chosen for the first tokens, the prompt's included: (tokens, layers, k) by
    request. None of the last token, which no request has read. kept_experts: the number of these that `drop` leaves.
    """

    prompt: list[int] = field(default_factory=list)
    turn: int = 0
    num_requests: int = 0
    speaks: bool = False
    kept: int = 0
    seed_key: tuple[bytes, int] = (b"", 0)
    opening: int = 0
    seed: int = 0
    most: int = 0
    num_generated: int = 0
    calls: int = 0
    transcript: Transcript = field(default_factory=Transcript)
    before: Transcript = field(default_factory=Transcript)
    experts: list[Tensor] = field(default_factory=list)
    kept_experts: int = 0

    @property
    def all_tokens(self) -> list[int]:
        return [*self.prompt, *self.token_ids]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def num_settled(self) -> int:
        """Tokens, without a turn that the engine is at and what was written right before that turn."""
        return len(self.prompt) + (self.kept if self.speaks else len(self.token_ids))

    @property
    def used(self) -> int:
        """Of these, behind the opening."""
        return max(0, self.num_settled - self.opening)

    @property
    def settled(self) -> Transcript:
        """Without a request that the model still answers."""
        return self.before if self.speaks else self.transcript

    def write(self, token_ids: Sequence[int], version: int) -> None:
        """What somebody else has written before the next turn."""
        self.kept, self.kept_experts = len(self.token_ids), len(self.experts)
        self.opening = self.opening or len(token_ids)
        self.add(token_ids, version)

    def add_experts(self, experts: Tensor) -> None:
        """Of a request that began with the first token. Tokens that an earlier request has read keep theirs.

        Also where that record is 0, since the engine had lost it: the later request has other weights.
        """
        known = sum(map(len, self.experts))
        self.experts.append(experts[known:].clone() if known else experts)  # what was read again does not stay

    def drop(self) -> None:
        """The last turn, and what was written right before that turn."""
        self.speaks, self.turn, self.transcript = False, self.turn - 1, self.before
        self.cut(self.kept)
        del self.experts[self.kept_experts :]
        self.opening = self.opening if self.num_tokens else 0


class TurnRow:
    """A row of many turns that has not ended. number: in the replica. of_rollout: in the rollout.

    several: the row may have several sequences. version: of the actor that the engine has now.

    On the first rank of the replica: columns: of the data. limit: tokens behind the prompt. begun: when the row's first
    turn, or agent, began, on the clock. waiting_since: when somebody else than the model had to go on; None while the
    model speaks. worker: the row's number in the pool of processes.
    """

    def __init__(self, number: int, of_rollout: int, request: Request, *, several: bool = False) -> None:
        self.number, self.of_rollout, self._several, self.version = number, of_rollout, several, 0
        self._first, self._read = request, set[tuple[bytes, int]]()  # of all turns, see `Branch.seed_key`
        self.branches = [Branch(prompt=request.prompt, opening=len(request.prompt))]
        self.columns: Mapping[str, Any] = {}
        self.limit, self.begun = 0, 0.0
        self.waiting_since: float | None = None
        self.worker: int | None = None

    @property
    def turn(self) -> int:
        """Of the model, in all sequences."""
        return sum(sequence.turn for sequence in self.branches)

    @property
    def num_speaking(self) -> int:
        return sum(sequence.speaks for sequence in self.branches)

    @property
    def answered(self) -> bool:
        """Whether the model has ended a turn that counts."""
        return any(sequence.settled.answered for sequence in self.branches)

    def apply(self, event: TurnEvent) -> list[EngineCall]:
        """Apply an event to the row, and return the engine calls that follow."""
        calls = []
        for number, sequence in enumerate(self.branches) if event.drops else ():
            if sequence.speaks if event.ends else number == event.branch:
                calls += [EngineCall(self._name(number))] if sequence.speaks else []
                self._read.discard(sequence.seed_key)  # what is asked next is asked as if there had been no such turn
                sequence.drop()
        if event.ends:
            self.branches[0].add(event.token_ids, self.version)
        elif not event.drops:
            if event.branch == len(self.branches):
                self.branches.append(Branch())
            self.branches[event.branch].write(event.token_ids, self.version)
            request = self._next_request(event.branch, event.max_tokens)
            calls.append(EngineCall(self._name(event.branch), request, event.max_tokens))
        return calls

    def hear(
        self,
        branch: int,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        *,
        experts: Tensor | None = None,
        ends: bool = True,
    ) -> None:
        """A turn of the model has ended, or was stopped within. experts: of all tokens that the request has read."""
        sequence = self.branches[branch]
        sequence.speaks = not ends
        sequence.add(token_ids, self.version, log_probs)
        if experts is not None:
            sequence.add_experts(experts)
        if not ends:
            sequence.num_generated, sequence.calls = sequence.num_generated + len(token_ids), sequence.calls + 1

    def resumed(self) -> list[EngineCall]:
        """What the engine is to do to go on with the turns that a stop has cut: a seed has the number of the stop."""
        calls = []
        for number, sequence in enumerate(self.branches):
            if sequence.speaks:
                seed = request_seed(sequence.seed, 0, sequence.calls)
                request = Request(sequence.all_tokens, seed, self._first.bucket, sequence.num_generated)
                calls.append(EngineCall(self._name(number), request, sequence.most - sequence.num_generated))
        return calls

    def _name(self, branch: int) -> str:
        return f"{self.number}.{branch}.{self.branches[branch].num_requests}"

    def _next_request(self, branch: int, max_tokens: int) -> Request:
        """Of the next turn, with a seed of its own: with the first turn's it would draw the same again."""
        sequence = self.branches[branch]
        sequence.turn, sequence.num_requests, sequence.speaks = sequence.turn + 1, sequence.num_requests + 1, True
        ids = sequence.all_tokens
        sequence.seed, sequence.most = self._seed(sequence, ids), max_tokens
        sequence.num_generated = sequence.calls = 0
        return Request(ids, sequence.seed, self._first.bucket)

    def _seed(self, sequence: Branch, ids: Sequence[int]) -> int:
        """Of a row that may have several sequences by the tokens: requests may come in another order next time."""
        if not self._several:
            return self._first.seed if sequence.turn == 1 else request_seed(self._first.seed, sequence.turn)
        digest = hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=8).digest()
        number = next(number for number in count(1) if (digest, number) not in self._read)
        sequence.seed_key = digest, number
        self._read.add(sequence.seed_key)
        return request_seed(self._first.seed, int.from_bytes(digest, "big"), number)

    def finished_row(self, last: TurnEvent) -> RolloutRow:
        """The finished row. Further branches without a sampled token are left out.

        Of a failed row the first branch alone is there, and none of its tokens counts.

        After one that begins with the row's prompt they stand in an order of their own, shortest beginnings first: an
        agent's requests may come in another order next time.
        """
        first, *further = self.branches
        there = [] if last.failed else [branch for branch in further if SAMPLED in branch.flags]
        if there and not first.prompt:  # the row's prompt is what the first branch begins with
            there += [first] if SAMPLED in first.flags else []
            first, *there = sorted(there, key=_order)
        row = RolloutRow(state=CUT if last.truncated else ENDED, rewards=last.rewards, calls=1)
        branches = [first, *sorted(there, key=_order)]
        for number, branch in enumerate(branches):
            row.extend(branch, begins=number > 0)
        row.experts = _experts_of(branches)
        if last.failed:
            row.log_probs, row.flags = [0.0] * len(row.token_ids), bytearray(len(row.token_ids))
        return row


def _experts_of(branches: Sequence[Branch]) -> Tensor | None:
    """Of the branches one after the other, but of the last token: (tokens - 1, layers, k), 0 where a token has none.

    None: no request has ended, or this rank records nothing.
    """
    known = [experts for branch in branches for experts in branch.experts]
    if not known:
        return None
    parts = list[Tensor]()
    for branch in branches:
        missing = branch.num_tokens - sum(map(len, branch.experts))
        parts += [*branch.experts, known[0].new_zeros(missing, *known[0].shape[1:])]
    return torch.cat(parts)[:-1]


def _order(branch: Branch) -> tuple[int, list[int]]:
    return branch.flags.index(SAMPLED), branch.token_ids


class ReplicaRows:
    """The rows of an engine replica. room: turns that the engine takes at a time; num_speaking: that it has now."""

    def __init__(self, *, several: bool = False, room: int = 1 << 30) -> None:
        self._records: dict[int, TurnRow] = {}
        self._several, self._next, self._version = several, 0, 0
        self.room, self.num_speaking, self.num_dropped = room, 0, 0
        self._happened: list[tuple[TurnEvent, list[EngineCall]]] = []

    def admit(self, requests: Sequence[Request], of_rollout: Sequence[int]) -> list[TurnRow]:
        """Further rows, which get the next numbers."""
        new = [
            TurnRow(self._next + i, row, request, several=self._several)
            for i, (request, row) in enumerate(zip(requests, of_rollout, strict=True))
        ]
        self._next += len(new)
        self._records |= {record.number: record for record in new}
        self.go_on(self._version)
        return new

    def forget(self, number: int) -> None:
        """The row has ended, and nobody asks for the record."""
        del self._records[number]

    def go_on(self, version: int) -> None:
        """The engine has the actor of this version from now on."""
        self._version = version
        for record in self.records:
            record.version = version

    @property
    def records(self) -> list[TurnRow]:
        return list(self._records.values())

    def __getitem__(self, number: int) -> TurnRow:
        return self._records[number]

    def __contains__(self, number: int) -> bool:
        return number in self._records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def has_events(self) -> bool:
        return bool(self._happened)

    def apply(self, event: TurnEvent) -> None:
        """See `TurnRow.apply`; `take_events` has the engine's calls."""
        record = self[event.row]
        turns, speaking = record.turn, record.num_speaking
        self._happened.append((event, record.apply(event)))
        self.num_speaking += record.num_speaking - speaking
        self.num_dropped += max(0, turns - record.turn)

    def hear(
        self,
        row: int,
        branch: int,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        experts: Tensor | None = None,
    ) -> None:
        """See `TurnRow.hear`."""
        self.num_speaking -= 1
        self[row].hear(branch, token_ids, log_probs, experts=experts)

    def take_events(self) -> list[tuple[TurnEvent, list[EngineCall]]]:
        """Those since the last call, in order, each with what the engine is to do."""
        found, self._happened = self._happened, []
        return found


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
