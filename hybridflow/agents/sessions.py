"""The rows of a rollout whose agents speak to a URL: each request of an agent is a turn of the model in its row.

    sessions = Agents(pool, continues, ...).conversations(prompts, counts, limits, seed)

See `rollout.turns.Answers`, and `door` for the URL. Nothing that was sampled is encoded again: a request whose messages
continue the row's conversation adds the tokens of what is new. The row ends with what the agent returns.
"""

import functools
import secrets
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hybridflow.agents.branches import NO_ROOM, Branch, NewTokens, Session, asked_again, place_of, with_new
from hybridflow.agents.chat_requests import Asked, AskedTokens, asked_for, ignored_keys, tokens_asked_for
from hybridflow.agents.chat_server import ChatRequest, ChatServer, Gone, Refusal
from hybridflow.agents.completions import Completion, TokenCompletion
from hybridflow.agents.reading import TurnReading
from hybridflow.agents.transcript import Transcript, new_tokens, sent, tokens_behind, turn_message
from hybridflow.batch import PromptBatch
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.data.continuations import Continuations
from hybridflow.data.fields import TOOLS
from hybridflow.data.messages import check_token_ids
from hybridflow.data.rows import RowError
from hybridflow.environments.failures import Failures
from hybridflow.environments.pool import AgentPool
from hybridflow.environments.time_limits import TimeLimits
from hybridflow.errors import ConfigError
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.tool_calls import Parsed, ToolCallParser
from hybridflow.rollout.turns import TurnCounts, TurnEvent

LEFT = "a client that left"  # among what the user knows
LOOK_SECONDS = 0.1  # between two looks at the time limit of rows, while all of them wait
BAD = 400  # OpenAI's client repeats a request with 408, 409, 429 and from 500 on, but not with this status


@dataclass(frozen=True)
class Agents:
    """What the rows of every rollout on this rank share. ends: tokens that end a turn. counts: of this rank.

    parser: of tool calls, for an agent's tools. token: that agents send. max_prompt_length: tokens of a first request
    that is the prompt. max_model_len: tokens of a row. stop: texts that end a turn.
    """

    pool: AgentPool
    continues: Continuations
    parser: Callable[[Sequence[Mapping[str, Any]]], ToolCallParser]
    decode: Callable[[list[int]], str]
    ends: frozenset[int]
    rank: int
    prompt_key: str
    token: str | None
    max_prompt_length: int
    max_model_len: int
    counts: TurnCounts = field(default_factory=TurnCounts)
    stop: Sequence[str] = ()
    told: set[str] = field(default_factory=set)  # keys of requests that were left aside, and the user knows it

    @property
    def num_rewards(self) -> int:
        """Parts that a row is given."""
        return len(self.pool.config.weights)

    @property
    def several(self) -> bool:
        """Whether a row may have several sequences."""
        return self.pool.config.several

    @functools.cached_property
    def door(self) -> ChatServer:
        """Opened with the first rollout of a rank that leads an engine replica."""
        return ChatServer(self.pool.config.listen, token=self.token, max_model_len=self.max_model_len)

    def conversations(
        self, prompts: PromptBatch, counts: Tensor, limits: LengthBuckets[int], seed: Sequence[int]
    ) -> "Sessions":
        """Of a rollout with so many rows of each prompt. limits: tokens behind a prompt. Errors: RewardError."""
        return Sessions(self, prompts, counts, limits)

    def new_tokens(self, columns: Mapping[str, Any]) -> NewTokens:
        """Of the requests of a row with these columns."""

        def of_request(talk: Transcript, asked: Asked | AskedTokens) -> list[int]:
            if isinstance(asked, AskedTokens):
                return tokens_behind(talk, asked)
            return new_tokens(talk, asked, columns, self.continues)

        return of_request

    @functools.cached_property
    def reading(self) -> TurnReading:
        """Of turns with tool calls."""
        return TurnReading(self.parser, self.continues, self.counts)


class Sessions:
    """Of this rank's rows of one rollout."""

    def __init__(self, shared: Agents, prompts: PromptBatch, counts: Tensor, limits: LengthBuckets[int]) -> None:
        self._shared, self._pool, self._config = shared, shared.pool, shared.pool.config
        self._prompts, self._limits, self._door = prompts, limits, shared.door
        self._prompt_of = [prompt for prompt, count in enumerate(counts.tolist()) for _ in range(count)]
        self._rows: list[Session] = []
        self._numbers: dict[str, int] = {}  # by name, of rows that have not ended
        self._by_ticket: dict[int, int] = {}  # of agents that run, whose row
        self._waiting = deque[int]()  # rows whose agents do not run yet
        self._ready: list[TurnEvent] = []
        self._failures = Failures(self._config, shared.rank)
        for answer in self._pool.start_processes():
            self._failures.show_printed(answer)
        self._times = TimeLimits(self._config)  # from here on

    # ---- as `rollout.turns.Answers`

    def begin(self, rows: Sequence[int]) -> list[int]:
        token_lists = self._prompts.token_lists()
        self._rows = [self._session(row, token_lists[self._prompt_of[row]]) for row in rows]
        self._numbers = {its.name: number for number, its in enumerate(self._rows)}
        self._waiting.extend(range(len(rows)))
        self._run_waiting()
        return [0] * len(rows)

    def said(
        self, row: int, token_ids: Sequence[int], log_probs: Sequence[float], *, truncated: bool, branch: int = 0
    ) -> None:
        its, shared = self._rows[row], self._shared
        of_row = its.branches[branch]
        talk, request = of_row.talk, of_row.request
        assert request is not None and of_row.asked is not None, "a turn of the model answers a request"
        ended = token_ids[-1] if token_ids[-1] in shared.ends else None
        shared.counts.turns += 1
        name, behind = f"{its.name}-{of_row.number}", (*talk.behind, *token_ids)
        of_row.talk = replace(talk, behind=behind, ended=ended, cut=truncated, answered=True)
        if isinstance(of_row.asked, AskedTokens):
            told = TokenCompletion(name, token_ids, log_probs, "length" if truncated else "stop", talk.tokens)
            self._door.answer(request, told)
        else:
            self._answer_chat(row, of_row, of_row.asked, token_ids, name, talk.tokens)
        of_row.request, of_row.answered = None, request
        if not its.open_requests:
            its.expected = time.monotonic()

    def _answer_chat(
        self, row: int, branch: Branch, asked: Asked, token_ids: Sequence[int], answer: str, prompt_tokens: int
    ) -> None:
        shared, talk = self._shared, branch.talk
        assert branch.request is not None, "it waits"
        text, truncated = shared.decode(list(token_ids if talk.ended is None else token_ids[:-1])), talk.cut
        reads_calls = TOOLS in asked.fields and asked.calls_tools and not truncated
        parsed = shared.reading.parsed(text, asked, self._rows[row].columns) if reads_calls else Parsed(text, ())
        name = f"call_{self._rows[row].row}_{branch.number}"
        message = turn_message(parsed, lambda number: shared.continues.call_id(f"{name}_{number}"))
        reason = "length" if truncated else "tool_calls" if parsed.calls else "stop"
        self._door.answer(
            branch.request,
            Completion(
                f"chatcmpl-{answer}",
                sent(message),
                reason,  # type: ignore[arg-type]  # mypy takes it for any text
                prompt_tokens,
                len(token_ids),
                asked.tells_usage,
            ),
        )
        branch.talk = replace(talk, messages=[*(talk.messages or ()), message])

    def replies(self, *, wait: bool) -> list[TurnEvent]:
        while True:
            if wait and not self._ready:
                self._wait()
            for ticket, answer in self._pool.answers(0.0).items():
                self._failures.show_printed(answer)
                if ticket in self._by_ticket:
                    self._returned(self._by_ticket.pop(ticket), answer)
            for event in self._door.taken():
                if isinstance(event, Gone):
                    self._gone(event.request)
                else:
                    self._requested(event)
            self._look_at_the_time()
            self._run_waiting()
            if self._ready or not wait:
                found, self._ready = self._ready, []
                return found

    def end(self) -> None:
        for event in self._door.taken():
            if isinstance(event, ChatRequest):
                self._requested(event)  # of a row that has ended
        self._failures.end()

    # ---- agents

    def _session(self, row: int, prompt: list[int]) -> Session:
        number = self._prompt_of[row]
        columns = {name: values[number] for name, values in self._prompts.columns.items()}
        messages = self._prompts.conversations[number] if self._prompts.conversations else None
        if messages is not None:
            columns[self._shared.prompt_key] = messages
        limit = self._limits.for_length(int(self._prompts.lengths[number]))
        return Session(row, f"{row}-{secrets.token_hex(8)}", columns, limit, [Branch.begun(prompt)], bool(prompt))

    def _run_waiting(self) -> None:
        while self._waiting and len(self._by_ticket) < self._pool.most_at_once:
            row = self._waiting.popleft()
            its = self._rows[row]
            its.agent, ticket = self._pool.run(self._door.base_url(its.name), its.columns)
            its.begun = its.expected = time.monotonic()
            self._by_ticket[ticket] = row

    def _returned(self, row: int, answer: Answer) -> None:
        its = self._rows[row]
        drops = bool(its.open_requests)  # nobody waits for their answers
        if answer.problem and its.spent and its.answered:  # what it raises is no fault of its own
            zeros = (0.0,) * len(self._config.weights)
            self._end(row, TurnEvent(row, ends=True, truncated=True, rewards=zeros, drops=drops))
        elif answer.problem:
            self._fail(row, answer.problem)
        elif not its.answered:
            self._fail(row, "the agent returned before the model had answered a request")
        else:
            first, rewards = its.branches[0].settled, tuple(answer.value["reward"])
            cut = its.spent or any(branch.settled.cut for branch in its.branches)
            # a model computes nothing for less than two tokens, and the row's own prompt stays where it was not used
            behind = (self._shared.continues.end,) if first.prompt and not first.used else ()
            self._end(row, TurnEvent(row, behind, ends=True, truncated=cut, rewards=rewards, drops=drops))

    # ---- requests

    def _requested(self, request: ChatRequest) -> None:
        row = self._numbers.get(request.row)
        if row is None:
            self._refuse(request, "row_ended", "the row of this URL has ended")
            return
        its, shared = self._rows[row], self._shared
        try:
            asked = self._asked(request, its)
            again = asked_again(its.branches, request, asked, several=shared.several)
            if again is not None:
                self._tell_again(request)
                self._gone(again)
            if its.turn >= self._config.max_turns and (shared.several or not its.open_requests):
                its.spent = True
                self._refuse(request, "turns_used_up", f"data.environment.max_turns = {its.turn} turns are used up")
                return
            branch, ids = place_of(its.branches, asked, shared.new_tokens(its.columns), several=shared.several)
            check_token_ids(ids, "the request", shared.continues.vocab_size)
        except RowError as error:
            self._refuse(request, "invalid_request", str(error))
        except ConfigError as error:
            self._refuse(request, "no_continuation", str(error))
            self._fail(row, str(error))
        else:
            self._accept(row, request, asked, branch, ids)

    def _asked(self, request: ChatRequest, its: Session) -> Asked | AskedTokens:
        """Errors: RowError."""
        if request.by_tokens:
            asked: Asked | AskedTokens = tokens_asked_for(request.body)
        else:
            asked = asked_for(request.body, self._shared.stop)
            self._shared.reading.check(asked, its.columns)
        self._tell_ignored(request.body)
        return asked

    def _accept(self, row: int, request: ChatRequest, asked: Asked | AskedTokens, branch: int, ids: list[int]) -> None:
        its, most = self._rows[row], self._config.max_turn_tokens
        of_row = its.branches[branch] if branch < len(its.branches) else Branch.begun([])
        prompt, behind = with_new(of_row.talk, ids)
        too_long, left = self._room(its, prompt, branch)
        left -= len(behind)
        if too_long or left < 1:
            its.spent = its.answered
            self._refuse(request, "context_length_exceeded", too_long or NO_ROOM)
            return
        if branch == len(its.branches):
            its.branches.append(of_row)
        its.turn, its.number, its.spent = its.turn + 1, its.number + 1, False
        of_row.ask(request, asked, ids, its.number)
        self._answered(its)
        limits = [limit for limit in (left, most, asked.max_tokens) if limit is not None]
        self._ready.append(TurnEvent(row, tuple(ids), min(limits), branch=branch))

    def _room(self, its: Session, prompt: list[int], branch: int) -> tuple[str, int]:
        """Why a sequence may not begin with such a prompt, nothing where it may; and how many tokens may follow that.

        All sequences of a row have the same room, but for one that goes on from a prompt of the data file.
        """
        most = self._shared.max_prompt_length
        if self._shared.several and (branch or not its.has_prompt):
            return "", most + its.limit - len(prompt)
        told = f"the request has {len(prompt)} tokens, more than data.max_prompt_length = {most}"
        return told if len(prompt) > most else "", its.limit

    def _gone(self, request: ChatRequest) -> None:
        """Its client no longer waits: the turn goes, and the same request may come again."""
        row = self._numbers.get(request.row)
        its = None if row is None else self._rows[row]
        if row is None or its is None:
            return
        for number, branch in enumerate(its.branches):
            if request is (branch.request or branch.answered):  # of an earlier one a later one has told
                self._refuse(request, "repeated", "the same request has come again")  # where its client is there
                branch.forget()
                its.turn -= 1
                its.expected = its.expected if its.open_requests else time.monotonic()
                self._ready.append(TurnEvent(row, drops=True, branch=number))

    def _refuse(self, request: ChatRequest, code: str, message: str) -> None:
        self._door.refuse(request, Refusal(BAD, code, message))

    def _tell_again(self, request: ChatRequest) -> None:
        if not request.repeated and LEFT not in self._shared.told:
            self._shared.told.add(LEFT)
            self._failures.show(
                "a client has ended its connection and asks the same again: the row has the later answer alone "
                "(environment/dropped_turns)"
            )

    def _tell_ignored(self, body: Any) -> None:
        new = ignored_keys(body) - self._shared.told
        if new:
            self._shared.told.update(new)
            self._failures.show(
                f"requests ask for {', '.join(sorted(new))}: left aside, as the model samples as `sampling` says"
            )

    # ---- ends

    def _end(self, row: int, reply: TurnEvent) -> None:
        its = self._rows[row]
        self._answered(its)
        for request in its.open_requests:
            self._refuse(request, "row_ended", "the row of this URL has ended")
        del self._numbers[its.name]
        if its.agent is not None:
            self._pool.finish(its.agent)
        self._ready.append(reply)

    def _fail(self, row: int, problem: str) -> None:
        """Errors: RewardError where that ends the run."""
        its = self._rows[row]
        reply = self._failures.reply(row, its.row, its.turn, problem, drops=bool(its.open_requests))
        first = its.branches[0].settled
        if not first.used:  # a model computes nothing for less than two tokens
            reply = replace(reply, token_ids=(self._shared.continues.end,) * (1 if first.prompt else 2))
        self._by_ticket = {ticket: other for ticket, other in self._by_ticket.items() if other != row}
        self._end(row, reply)

    def _look_at_the_time(self) -> None:
        """Agents that are late have failed, and all rows that are left when the rollout has no time left."""
        if told := self._times.rollout():
            self._waiting.clear()
            for row in list(self._numbers.values()):
                self._fail(row, told)
        for row in list(self._by_ticket.values()):
            its = self._rows[row]
            late = self._times.request(its.expected) if its.expected is not None else ""
            if late or (late := self._times.row(its.begun)):
                self._fail(row, late)

    def _answered(self, its: Session) -> None:
        if its.expected is not None:
            self._shared.counts.seconds += time.monotonic() - its.expected
        its.expected = None

    def _wait(self) -> None:
        """For the pool or the door."""
        poll = select.poll()
        for one in (self._pool, self._door):
            poll.register(one.fileno(), select.POLLIN)
        poll.poll(1000 * LOOK_SECONDS)
