"""Generate rows of many turns: between two turns somebody else writes, or says that the row has ended.

A further turn is a new request with all tokens of the row so far, most of which the prefix cache has. Of an engine of
several ranks the first alone asks who answers; it tells the others before each step, in one broadcast, which rows go on
and with what, so that all add the same requests in the same order. Without that the ranks would sample wrong tokens.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout.engine import Request, Response, RolloutEngine, response_of

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import RequestOutput, SamplingParams

SLOTS = 512  # numbers of the first broadcast: what mostly is enough
HEAD = 6  # numbers of a reply before its tokens


@dataclass(frozen=True)
class TurnEvent:
    """What is answered to a turn of a row: tokens behind it and how many the next turn may have, or the row's end.

    token_ids: behind the turn, also where the row ends. truncated: the row has ended at a limit. rewards: NaN of a row
    that has failed. failed: none of its tokens counts.
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


class Answers(Protocol):
    """Who answers the model, on the first rank of an engine replica. Rows are numbered from 0."""

    def begin(self, rows: Sequence[int]) -> list[int]:
        """Rows of the rollout begin, by their numbers there. How many tokens the first turn of each may have.

        0: the row waits for a reply before its first turn.
        """

    def said(
        self, row: int, token_ids: Sequence[int], log_probs: Sequence[float], *, truncated: bool, branch: int
    ) -> None:
        """A turn of the model has ended, with a log-prob for each token; truncated: at its limit of tokens."""

    def replies(self, *, wait: bool) -> list[TurnEvent]:
        """Those that have come. wait: until there is one."""

    def end(self) -> None:
        """No row is under way any more."""


class LeaderBroadcast:
    """Of the ranks of an engine replica: the first one's list of replies, on all of them."""

    def __init__(self, group: dist.ProcessGroup | None, leader: int, device: torch.device) -> None:
        """group: of the replica; None of one rank. leader: its first rank."""
        self._group, self._leader, self._device = group, leader, device
        self.leads = group is None or dist.get_rank() == leader

    def on_all(self, replies: Sequence[TurnEvent]) -> list[TurnEvent]:
        """Those of the first rank; rewards stay with it."""
        if self._group is None:
            return list(replies)
        told = self._broadcast(_packed(replies))
        return list(replies) if self.leads else _unpacked(told)

    def numbers(self, own: Sequence[int], count: int) -> list[int]:
        """So many numbers of the first rank; where there are none nobody is told."""
        if self._group is None or not count:
            return list(own)
        return self._sent(list(own) if self.leads else [0] * count)

    def _broadcast(self, numbers: list[int]) -> list[int]:
        """[how many, ...], of which a second broadcast has what the first has no room for."""
        room = SLOTS - 1
        first = self._sent([len(numbers), *numbers[:room], *[0] * (room - len(numbers))])
        size, found = first[0], first[1:]
        if size > room:
            found += self._sent(numbers[room:] if self.leads else [0] * (size - room))
        return found[:size]

    def _sent(self, numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.broadcast(tensor, src=self._leader, group=self._group)
        return [int(number) for number in tensor.tolist()]


def _packed(replies: Sequence[TurnEvent]) -> list[int]:
    return [
        number
        for reply in replies
        for number in (
            reply.row,
            reply.branch,
            reply.max_tokens,
            int(reply.ends),
            int(reply.truncated) + 2 * int(reply.failed) + 4 * int(reply.drops),
            len(reply.token_ids),
            *reply.token_ids,
        )
    ]


def _unpacked(numbers: list[int]) -> list[TurnEvent]:
    found, at = [], 0
    while at < len(numbers):
        row, branch, most, ends, how, size = numbers[at : at + HEAD]
        ids = tuple(numbers[at + HEAD : at + HEAD + size])
        told = TurnEvent(row, ids, most, bool(ends), bool(how & 1), failed=bool(how & 2), drops=bool(how & 4))
        found.append(replace(told, branch=branch))
        at += HEAD + size
    return found


@dataclass
class _Branch:
    """A sequence of a row: what is behind the row's prompt so far, and of a further branch all there is.

    turn: the last that the engine was asked for, without those that were dropped; asked: with them. speaks: the engine
    is at it. kept: tokens before that turn and before what was written right before it. read: what it was asked with,
    and a number that tells it from equal ones.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turn: int = 0
    asked: int = 0
    speaks: bool = False
    kept: int = 0
    read: tuple[bytes, int] = (b"", 0)

    def drop(self) -> None:
        """The last turn, and what was written right before that turn."""
        self.speaks, self.turn = False, self.turn - 1
        for tokens in (self.token_ids, self.log_probs, self.sampled):
            del tokens[self.kept :]

    def add(self, token_ids: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """log_probs: of what was sampled; none of what somebody else has written."""
        self.token_ids += token_ids
        self.log_probs += [0.0] * len(token_ids) if log_probs is None else log_probs
        self.sampled += [log_probs is not None] * len(token_ids)


class _Row:
    """One that is under way. branches: the first goes on from the row's prompt. several: there may be others."""

    def __init__(self, request: Request, *, several: bool = False) -> None:
        self._first, self._several, self.branches = request, several, [_Branch()]
        self._read = set[tuple[bytes, int]]()  # of all turns, see `_Branch.read`

    def write(self, number: int, token_ids: Sequence[int]) -> None:
        """What somebody else has written in this branch, or begins the next one with."""
        if number == len(self.branches):
            self.branches.append(_Branch())
        branch = self.branches[number]
        branch.kept = len(branch.token_ids)
        branch.add(token_ids)

    def next_request(self, number: int) -> Request:
        """Of the next turn, with a seed of its own: with the first turn's it would draw the same again."""
        branch, first = self.branches[number], self._first
        branch.turn, branch.asked, branch.speaks = branch.turn + 1, branch.asked + 1, True
        ids = [*(() if number else first.prompt), *branch.token_ids]
        return Request(ids, self._seed(branch, ids), first.bucket)

    def _seed(self, branch: _Branch, ids: Sequence[int]) -> int:
        """Of a row that may have several sequences by the tokens: requests may come in another order next time."""
        if not self._several:
            return self._first.seed if branch.turn == 1 else request_seed(self._first.seed, branch.turn)
        digest = hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=8).digest()
        number = next(number for number in count(1) if (digest, number) not in self._read)
        branch.read = digest, number
        self._read.add(branch.read)
        return request_seed(self._first.seed, int.from_bytes(digest, "big"), number)

    def drop(self, number: int) -> None:
        """See `_Branch.drop`. What is asked next is asked as if there had been no such turn."""
        branch = self.branches[number]
        self._read.discard(branch.read)
        branch.drop()

    def num_tokens(self, number: int) -> int:
        """Of a branch, the row's prompt included."""
        return len(self.branches[number].token_ids) + (0 if number else len(self._first.prompt))

    def response(self, last: TurnEvent) -> Response:
        """Branches in which the model has said nothing are left out, and of a row that has failed all but the first.

        After one that begins with the row's prompt they stand in an order of their own, shortest beginnings first: an
        agent's requests may come in another order next time.
        """
        first, *further = self.branches
        there = [] if last.failed else [branch for branch in further if any(branch.sampled)]
        if there and not self._first.prompt:  # the row's prompt is what its first branch begins with
            there += [first] if any(first.sampled) else []
            first, *there = sorted(there, key=_order)
        there.sort(key=_order)
        starts, token_ids, log_probs, sampled = [], [*first.token_ids], [*first.log_probs], [*first.sampled]
        for branch in there:
            starts.append(len(token_ids))
            token_ids += branch.token_ids
            log_probs += branch.log_probs
            sampled += branch.sampled
        if last.failed:
            log_probs, sampled = [0.0] * len(token_ids), [False] * len(token_ids)
        return Response(
            token_ids, log_probs, last.truncated, sampled=sampled, rewards=last.rewards, branch_starts=tuple(starts)
        )


def _order(branch: _Branch) -> tuple[int, list[int]]:
    return branch.sampled.index(True), branch.token_ids


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
        rows: Sequence[int],
        params: "Sequence[SamplingParams]",
        *,
        stepped: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, Response]]:
        """(index, response) of each request, in the order in which they end. rows: of the rollout, by request.

        params: by bucket. stepped: called after each step of the engine.
        """
        there = [_Row(request, several=self.several) for request in requests]
        begun = self.answers.begin(rows) if self.answers is not None else []
        for number, most in enumerate(self.agreement.numbers(begun, len(there))):
            if most:
                self._add(engine, number, there[number], params, most)
        left = len(there)
        while left:
            for reply in self._agreed(wait=not engine.is_busy):
                row = there[reply.row]
                if reply.drops:
                    self._drop(engine, reply, row)
                if reply.ends:
                    row.branches[0].add(reply.token_ids)
                    left -= 1
                    yield reply.row, row.response(reply)
                elif not reply.drops:
                    row.write(reply.branch, reply.token_ids)
                    self._add(engine, reply.row, row, params, reply.max_tokens, reply.branch)
            for output in engine.step() if engine.is_busy else ():
                self._take(output, there)
            stepped()
        if self.answers is not None:
            self.answers.end()
        engine.wait_until_idle()

    def _agreed(self, *, wait: bool) -> list[TurnEvent]:
        return self.agreement.on_all(self.answers.replies(wait=wait) if self.answers is not None else ())

    def _add(
        self,
        engine: RolloutEngine,
        number: int,
        row: _Row,
        params: "Sequence[SamplingParams]",
        most: int,
        branch: int = 0,
    ) -> None:
        request = row.next_request(branch)
        name = f"{number}.{branch}.{row.branches[branch].asked}"
        engine.add(name, request, params[request.bucket], max_tokens=most)

    def _drop(self, engine: RolloutEngine, reply: TurnEvent, row: _Row) -> None:
        for number, branch in enumerate(row.branches):
            if branch.speaks if reply.ends else number == reply.branch:
                if branch.speaks:
                    engine.abort(f"{reply.row}.{number}.{branch.asked}")
                row.drop(number)
                self.counts.dropped += self.answers is not None

    def _take(self, output: "RequestOutput", there: Sequence[_Row]) -> None:
        number, of_row, asked = map(int, output.request_id.split("."))
        said, row = response_of(output.outputs[0]), there[number]
        branch = row.branches[of_row]
        if not branch.speaks or asked != branch.asked:
            return  # of a turn that was dropped while a step was under way
        branch.speaks = False
        if branch.turn > 1:
            self.counts.prefix_tokens += row.num_tokens(of_row)
            self.counts.cached_tokens += output.num_cached_tokens or 0
        branch.add(said.token_ids, said.log_probs)
        if self.answers is not None:
            self.answers.said(number, said.token_ids, said.log_probs, truncated=said.truncated, branch=of_row)
