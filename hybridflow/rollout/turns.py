"""Generate rows of many turns: between two turns somebody else writes, or says that the row has ended.

A further turn is a new request with all tokens of the row so far, most of which the prefix cache has. Of an engine of
several ranks the first alone asks who answers; it tells the others before each step, in one broadcast, which rows go on
and with what, so that all add the same requests in the same order. Without that the ranks would sample wrong tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout.engine import Request, Response, RolloutEngine, response_of

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import RequestOutput, SamplingParams

SLOTS = 512  # numbers of the first broadcast: what mostly is enough
HEAD = 5  # numbers of a reply before its tokens


@dataclass(frozen=True)
class Reply:
    """What is answered to a turn of a row: tokens behind it and how many the next turn may have, or the row's end.

    token_ids: behind the turn, also where the row ends. truncated: the row has ended at a limit. rewards: NaN of a row
    that has failed. failed: none of its tokens counts.
    drops: the row's last turn, and what was written right before that turn, go. The engine may still be at that turn.
    """

    row: int
    token_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    ends: bool = False
    truncated: bool = False
    rewards: tuple[float, ...] = ()
    failed: bool = False
    drops: bool = False


@dataclass
class TurnCounts:
    """Of this rank since somebody emptied them. seconds: that rows have waited, together; cached: prefix tokens."""

    turns: int = 0
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

    def said(self, row: int, token_ids: Sequence[int], log_probs: Sequence[float], *, truncated: bool) -> None:
        """A turn of the model has ended, with a log-prob for each token; truncated: at its limit of tokens."""

    def replies(self, *, wait: bool) -> list[Reply]:
        """Those that have come. wait: until there is one."""

    def end(self) -> None:
        """No row is under way any more."""


class Agreement:
    """Of the ranks of an engine replica: the first one's list of replies, on all of them."""

    def __init__(self, group: dist.ProcessGroup | None, leader: int, device: torch.device) -> None:
        """group: of the replica; None of one rank. leader: its first rank."""
        self._group, self._leader, self._device = group, leader, device
        self.leads = group is None or dist.get_rank() == leader

    def on_all(self, replies: Sequence[Reply]) -> list[Reply]:
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


def _packed(replies: Sequence[Reply]) -> list[int]:
    return [
        number
        for reply in replies
        for number in (
            reply.row,
            reply.max_tokens,
            int(reply.ends),
            int(reply.truncated) + 2 * int(reply.failed) + 4 * int(reply.drops),
            len(reply.token_ids),
            *reply.token_ids,
        )
    ]


def _unpacked(numbers: list[int]) -> list[Reply]:
    found, at = [], 0
    while at < len(numbers):
        row, most, ends, how, size = numbers[at : at + HEAD]
        ids = tuple(numbers[at + HEAD : at + HEAD + size])
        found.append(Reply(row, ids, most, bool(ends), bool(how & 1), failed=bool(how & 2), drops=bool(how & 4)))
        at += HEAD + size
    return found


@dataclass
class _Row:
    """One that is under way: what is behind its prompt so far.

    speaks: the engine is at its last turn. kept: tokens before that turn and before what was written right before it.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turn: int = 0
    speaks: bool = False
    kept: int = 0

    def next_request(self) -> Request:
        """Of its next turn, with a seed of its own: with the first turn's it would draw the same again."""
        self.turn, self.speaks = self.turn + 1, True
        first = self.request
        seed = first.seed if self.turn == 1 else request_seed(first.seed, self.turn)
        return Request([*first.prompt, *self.token_ids], seed, first.bucket)

    def drop(self) -> None:
        """The last turn, and what was written right before that turn."""
        self.speaks = False
        for tokens in (self.token_ids, self.log_probs, self.sampled):
            del tokens[self.kept :]

    def add(self, token_ids: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """log_probs: of what was sampled; none of what somebody else has written."""
        self.token_ids += token_ids
        self.log_probs += [0.0] * len(token_ids) if log_probs is None else log_probs
        self.sampled += [log_probs is not None] * len(token_ids)

    def response(self, last: Reply) -> Response:
        sampled = [False] * len(self.sampled) if last.failed else self.sampled
        log_probs = [0.0] * len(self.sampled) if last.failed else self.log_probs
        return Response(self.token_ids, log_probs, last.truncated, sampled=sampled, rewards=last.rewards)


@dataclass(frozen=True)
class TurnTaking:
    """How the rows of a replica take turns. answers: on its first rank."""

    agreement: Agreement
    answers: Answers | None
    counts: TurnCounts

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
        there = [_Row(request) for request in requests]
        begun = self.answers.begin(rows) if self.answers is not None else []
        for number, most in enumerate(self.agreement.numbers(begun, len(there))):
            if most:
                self._add(engine, number, there[number], params, most)
        left = len(there)
        while left:
            for reply in self._agreed(wait=not engine.is_busy):
                row = there[reply.row]
                if reply.drops:
                    self._drop(engine, reply.row, row)
                if reply.ends:
                    row.add(reply.token_ids)
                    left -= 1
                    yield reply.row, row.response(reply)
                elif not reply.drops:
                    row.kept = len(row.token_ids)
                    row.add(reply.token_ids)
                    self._add(engine, reply.row, row, params, reply.max_tokens)
            for output in engine.step() if engine.is_busy else ():
                self._take(output, there)
            stepped()
        if self.answers is not None:
            self.answers.end()
        engine.settle()

    def _agreed(self, *, wait: bool) -> list[Reply]:
        return self.agreement.on_all(self.answers.replies(wait=wait) if self.answers is not None else ())

    def _add(
        self, engine: RolloutEngine, number: int, row: _Row, params: "Sequence[SamplingParams]", most: int
    ) -> None:
        request = row.next_request()
        engine.add(f"{number}.{row.turn}", request, params[request.bucket], max_tokens=most)

    def _drop(self, engine: RolloutEngine, number: int, row: _Row) -> None:
        if row.speaks:
            engine.abort(f"{number}.{row.turn}")
        row.drop()

    def _take(self, output: "RequestOutput", there: Sequence[_Row]) -> None:
        number, turn = map(int, output.request_id.split("."))
        said, row = response_of(output.outputs[0]), there[number]
        if not row.speaks or turn != row.turn:
            return  # of a turn that was dropped while a step was under way
        row.speaks = False
        if row.turn > 1:
            self.counts.prefix_tokens += len(row.request.prompt) + len(row.token_ids)
            self.counts.cached_tokens += output.num_cached_tokens or 0
        row.add(said.token_ids, said.log_probs)
        if self.answers is not None:
            self.answers.said(number, said.token_ids, said.log_probs, truncated=said.truncated)
