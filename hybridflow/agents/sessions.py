"""The rows of a rollout whose agents speak to a URL: each request of an agent is one turn of the model.

    sessions = Agents(pool, continues, ...).answers(rows)

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
from typing import Any, Literal

from hybridflow.agents.branches import NO_ROOM, NewTokens, SequenceRequest, Session, asked_again, place_of
from hybridflow.agents.chat_requests import Asked, AskedTokens, asked_for, ignored_keys, tokens_asked_for
from hybridflow.agents.chat_server import ChatRequest, ChatServer, Gone, Refusal
from hybridflow.agents.completions import Completion, TokenCompletion
from hybridflow.agents.transcript import TurnReading, in_openai_form, new_tokens, tokens_behind, turn_message
from hybridflow.data.continuations import Continuations
from hybridflow.data.fields import TOOLS
from hybridflow.data.messages import Message, check_token_ids
from hybridflow.data.rows import RowError
from hybridflow.environments.failures import Failures
from hybridflow.environments.pool import AgentPool
from hybridflow.environments.time_limits import LOOK_SECONDS, MOST_STARTS, TimeLimits
from hybridflow.errors import ConfigError
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.row import RolloutRow
from hybridflow.rollout.rows import Branch, ReplicaRows, TurnCounts, TurnEvent, TurnRow
from hybridflow.rollout.tool_calls import Parsed, ToolCallParser
from hybridflow.rollout.turns import Episode

LEFT = "a client that left"  # among what the user knows
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
    shown: set[str] = field(default_factory=set)  # keys of requests that were left aside, and the user knows

    @property
    def num_rewards(self) -> int:
        """Parts that a row is given."""
        return len(self.pool.config.weights)

    @property
    def several(self) -> bool:
        """Whether a row may have several sequences."""
        return self.pool.config.several

    @functools.cached_property
    def server(self) -> ChatServer:
        """Opened with the first rollout of a rank that leads an engine replica."""
        return ChatServer(self.pool.config.listen, token=self.token, max_model_len=self.max_model_len)

    def answers(self, rows: ReplicaRows) -> "Sessions":
        """Of the rows of a rollout, or of all partial ones. Errors: RewardError."""
        return Sessions(self, rows)

    def new_tokens(self, columns: Mapping[str, Any]) -> NewTokens:
        """Of the requests of a row with these columns."""

        def of_request(sequence: Branch, asked: Asked | AskedTokens) -> list[int]:
            if isinstance(asked, AskedTokens):
                return tokens_behind(sequence, asked)
            return new_tokens(sequence, asked, columns, self.continues)

        return of_request

    @functools.cached_property
    def reading(self) -> TurnReading:
        """Of turns with tool calls."""
        return TurnReading(self.parser, self.continues, self.counts)


class Sessions:
    """Of this rank's rows of one rollout, or of all partial ones."""

    def __init__(self, shared: Agents, rows: ReplicaRows) -> None:
        self._shared, self._pool, self._config = shared, shared.pool, shared.pool.config
        self._rows, self._server = rows, shared.server
        self._by_number: dict[int, Session] = {}
        self._left: dict[str, Session] = {}  # by name, of rows that have not ended
        self._by_ticket: dict[int, Session] = {}  # of agents that run
        self._waiting = deque[Session]()  # rows whose agents do not run yet
        self._failures = Failures(self._config, shared.rank)
        for answer in self._pool.start_processes():
            self._failures.show_printed(answer)
        self._times = TimeLimits(self._config)  # from here on

    # ---- as `rollout.turns.Answers`

    def admit(self, records: Sequence[TurnRow], episodes: Sequence[Episode]) -> None:
        new = list(map(self._new, records, episodes))
        self._waiting.extend(new)
        self._by_number |= {session.record.number: session for session in new}
        self._left |= {session.name: session for session in new}
        self._run_waiting()

    def pause(self) -> None:
        self._pool.set_aside(self._by_ticket)
        self._server.set_aside(self._left)
        self._times.pause()
        self._failures.end()

    def resume(self) -> None:
        self._pool.take_back(self._by_ticket)
        self._server.take_back()
        self._times.resume(session.record for session in self._left.values())
        self._failures = Failures(self._config, self._shared.rank)

    def abandon(self) -> None:
        self._pool.finish_all(session.record.worker for session in self._left.values())

    def on_turn_end(self, row: TurnRow, branch: int, turn: RolloutRow) -> None:
        session, shared, sequence = self._by_number[row.number], self._shared, row.branches[branch]
        of_sequence, token_ids = session.requests[branch], turn.token_ids
        request, asked = of_sequence.request, of_sequence.asked
        assert request is not None and asked is not None, "a turn of the model answers a request"
        ended = token_ids[-1] if token_ids[-1] in shared.ends else None
        shared.counts.turns += 1
        name, num_prompt = f"{session.name}-{of_sequence.number}", sequence.num_tokens - len(token_ids)
        sequence.transcript = replace(sequence.transcript, ended=ended, cut=turn.truncated, answered=True)
        if isinstance(asked, AskedTokens):
            reason: Literal["length", "stop"] = "length" if turn.truncated else "stop"
            self._server.answer(request, TokenCompletion(name, token_ids, turn.log_probs, reason, num_prompt))
        else:
            message, why = self._message(session, branch, asked, token_ids)
            answer = Completion(
                f"chatcmpl-{name}",
                in_openai_form(message),
                why,
                num_prompt,
                len(token_ids),
                tells_usage=asked.tells_usage,
            )
            self._server.answer(request, answer)
            transcript = sequence.transcript
            sequence.transcript = replace(transcript, messages=[*(transcript.messages or ()), message])
        of_sequence.request, of_sequence.answered = None, request
        if not session.open_requests:
            row.waiting_since = time.monotonic()

    def _message(
        self, session: Session, branch: int, asked: Asked, token_ids: Sequence[int]
    ) -> tuple[Message, Literal["length", "tool_calls", "stop"]]:
        """A turn of the model, and why it has ended."""
        shared, transcript = self._shared, session.record.branches[branch].transcript
        text = shared.decode(list(token_ids if transcript.ended is None else token_ids[:-1]))
        reads_calls = TOOLS in asked.fields and asked.calls_tools and not transcript.cut
        parsed = shared.reading.parsed(text, asked, session.record.columns) if reads_calls else Parsed(text, ())
        name = f"call_{session.record.of_rollout}_{session.requests[branch].number}"
        message = turn_message(parsed, lambda number: shared.continues.call_id(f"{name}_{number}"))
        return message, "length" if transcript.cut else "tool_calls" if parsed.calls else "stop"

    def work(self, *, wait: bool) -> None:
        while True:
            if wait and not self._rows.has_events:
                self._wait()
            for ticket, answer in self._pool.answers(0.0).items():
                self._failures.show_printed(answer)
                if ticket in self._by_ticket:
                    self._returned(self._by_ticket.pop(ticket), answer)
            for event in self._server.take_events():
                if isinstance(event, Gone):
                    self._gone(event.request)
                else:
                    self._requested(event)
            if self._times.are_due():
                self._look_at_the_time()
            self._run_waiting()
            if self._rows.has_events or not wait:
                return

    def end(self) -> None:
        for event in self._server.take_events():
            if isinstance(event, ChatRequest):
                self._requested(event)  # of a row that has ended
        self._failures.end()

    # ---- agents

    def _new(self, record: TurnRow, episode: Episode) -> Session:
        prompt = {} if episode.messages is None else {self._shared.prompt_key: episode.messages}
        record.columns, record.limit = {**episode.columns, **prompt}, episode.limit
        return Session(record, f"{record.of_rollout}-{secrets.token_hex(8)}", bool(record.branches[0].prompt))

    def _run_waiting(self) -> None:
        """Agents run when the engine has room for a turn, and the processes for an agent."""
        while self._waiting and len(self._by_ticket) < self._pool.most_at_once:
            about_to_ask = sum(not session.record.turn for session in self._by_ticket.values())
            if self._rows.num_speaking + about_to_ask >= self._rows.room:
                return
            record = (session := self._waiting.popleft()).record
            record.worker, session.ticket = self._pool.run(self._server.base_url(session.name), record.columns)
            session.starts += 1
            record.begun = record.waiting_since = time.monotonic()
            self._by_ticket[session.ticket] = session

    def _returned(self, session: Session, answer: Answer) -> None:
        record, drops = session.record, bool(session.open_requests)  # nobody waits for their answers
        if answer.lost and not record.answered and session.starts < MOST_STARTS:
            self._start_again(session)
        elif answer.problem and session.spent and record.answered:  # what the agent raises is no fault of the agent
            zeros = (0.0,) * len(self._config.weights)
            self._end(session, TurnEvent(record.number, ends=True, truncated=True, rewards=zeros, drops=drops))
        elif answer.problem:
            self._fail(session, answer.problem)
        elif not record.answered:
            self._fail(session, "the agent returned before the model had answered a request")
        else:
            first, rewards = record.branches[0], tuple(answer.value["reward"])
            cut = session.spent or any(sequence.settled.cut for sequence in record.branches)
            # a model computes nothing for less than two tokens, and the row's own prompt stays where it was not used
            behind = (self._shared.continues.end,) if session.has_prompt and not first.used else ()
            event = TurnEvent(record.number, behind, ends=True, truncated=cut, rewards=rewards, drops=drops)
            self._end(session, event)

    def _start_again(self, session: Session) -> None:
        """The process has ended, and the agent had no answer of the model."""
        for request in session.open_requests:
            self._gone(request)
        self._answered(session)
        assert session.record.worker is not None
        self._pool.finish(session.record.worker)
        session.record.worker = None
        self._waiting.append(session)

    # ---- requests

    def _requested(self, request: ChatRequest) -> None:
        session, shared = self._left.get(request.row), self._shared
        if session is None:
            self._refuse(request, "row_ended", "the row of this URL has ended")
            return
        try:
            asked = self._asked(request, session)
            again = asked_again(session.requests, request, asked, several=shared.several)
            if again is not None:
                self._tell_again(request)
                self._gone(again)
            if session.record.turn >= self._config.max_turns and (shared.several or not session.open_requests):
                session.spent = True
                used = f"data.environment.max_turns = {session.record.turn} turns are used up"
                self._refuse(request, "turns_used_up", used)
                return
            new = shared.new_tokens(session.record.columns)
            branch, ids = place_of(session.record.branches, asked, new, several=shared.several)
            check_token_ids(ids, "the request", shared.continues.vocab_size)
        except RowError as error:
            self._refuse(request, "invalid_request", str(error))
        except ConfigError as error:
            self._refuse(request, "no_continuation", str(error))
            self._fail(session, str(error))
        else:
            self._accept(session, request, asked, branch, ids)

    def _asked(self, request: ChatRequest, session: Session) -> Asked | AskedTokens:
        """Errors: RowError."""
        if request.by_tokens:
            asked: Asked | AskedTokens = tokens_asked_for(request.body)
        else:
            asked = asked_for(request.body, self._shared.stop)
            self._shared.reading.check(asked, session.record.columns)
        self._tell_ignored(request.body)
        return asked

    def _accept(
        self, session: Session, request: ChatRequest, asked: Asked | AskedTokens, branch: int, ids: list[int]
    ) -> None:
        record, most = session.record, self._config.max_turn_tokens
        sequence = record.branches[branch] if branch < len(record.branches) else Branch()
        opening = sequence.opening or len(ids)
        too_long, left = session.room(opening, branch, self._shared.max_prompt_length, several=self._shared.several)
        left -= sequence.num_tokens + len(ids) - opening
        if too_long or left < 1:
            session.spent = record.answered
            self._refuse(request, "context_length_exceeded", too_long or NO_ROOM)
            return
        self._answered(session)
        session.number, session.spent = session.number + 1, False
        limits = [limit for limit in (left, most, asked.max_tokens) if limit is not None]
        self._rows.apply(TurnEvent(record.number, tuple(ids), min(limits), branch=branch))
        if branch == len(session.requests):
            session.requests.append(SequenceRequest())
        of_sequence, sequence = session.requests[branch], record.branches[branch]
        of_sequence.asked, of_sequence.request, of_sequence.number = asked, request, session.number
        sequence.before = talk = sequence.transcript
        messages, fields = (asked.messages, asked.fields) if isinstance(asked, Asked) else (None, talk.fields)
        sequence.transcript = replace(talk, messages=messages, fields=fields)

    def _gone(self, request: ChatRequest) -> None:
        """Nobody waits for the answer: the turn goes, and the same request may come again."""
        session = self._left.get(request.row)
        if session is None:
            return
        for branch, each in enumerate(session.requests):
            if request is (each.request or each.answered):  # of an earlier one a later one has shown
                self._refuse(request, "repeated", "the same request has come again")  # if a client is there
                each.request = each.answered = None
                self._rows.apply(TurnEvent(session.record.number, drops=True, branch=branch))
                if not session.open_requests:
                    session.record.waiting_since = time.monotonic()

    def _refuse(self, request: ChatRequest, code: str, message: str) -> None:
        self._server.refuse(request, Refusal(BAD, code, message))

    def _tell_again(self, request: ChatRequest) -> None:
        if not request.repeated and LEFT not in self._shared.shown:
            self._shared.shown.add(LEFT)
            self._failures.show(
                "a client has ended its connection and asks the same again: the row has the later answer alone "
                "(environment/dropped_turns)"
            )

    def _tell_ignored(self, body: Any) -> None:
        new = ignored_keys(body) - self._shared.shown
        if new:
            self._shared.shown.update(new)
            self._failures.show(
                f"requests ask for {', '.join(sorted(new))}: left aside, as the model samples as `sampling` says"
            )

    # ---- ends

    def _end(self, session: Session, event: TurnEvent) -> None:
        self._answered(session)
        for request in session.open_requests:
            self._refuse(request, "row_ended", "the row of this URL has ended")
        del self._left[session.name], self._by_number[session.record.number]
        if session.ticket is not None:
            self._by_ticket.pop(session.ticket, None)
        if session.record.worker is not None:
            self._pool.finish(session.record.worker)
        self._rows.apply(event)

    def _fail(self, session: Session, problem: str) -> None:
        """Errors: RewardError where that ends the run."""
        event = self._failures.event(session.record, problem, drops=bool(session.open_requests))
        first = session.record.branches[0]
        if not first.used:  # a model computes nothing for less than two tokens
            event = replace(event, token_ids=(self._shared.continues.end,) * (1 if first.num_settled else 2))
        self._end(session, event)

    def _look_at_the_time(self) -> None:
        """Agents that are late have failed, and all rows that are left when the rollout has no time left."""
        if late := self._times.rollout():
            self._waiting.clear()
            for session in list(self._left.values()):
                self._fail(session, late)
        for session in list(self._by_ticket.values()):
            since = session.record.waiting_since
            late = self._times.request(since) if since is not None else ""
            if late or (late := self._times.row(session.record.begun)):
                self._fail(session, late)

    def _answered(self, session: Session) -> None:
        if session.record.waiting_since is not None:
            self._shared.counts.seconds += time.monotonic() - session.record.waiting_since
        session.record.waiting_since = None

    def _wait(self) -> None:
        """For the pool or the server."""
        poll = select.poll()
        for one in (self._pool, self._server):
            poll.register(one.fileno(), select.POLLIN)
        poll.poll(1000 * LOOK_SECONDS)
