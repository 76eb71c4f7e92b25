"""The rows of a rollout in conversation with their environments: what each turn of the model is answered.

    answers = Environments(pool, continuations, parser, ...).answers(rows)

See `rollout.turns.Answers`. A turn goes to the row's instance: tool calls, else `step`. What comes back is tokens
behind the turn, or a reward. A row that has no token or turn left for an answer is asked once more, with
`ModelTurn.truncated`: what is no number then is 0 in each part, and the row counts as truncated.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from hybridflow.environments.failures import Failures
from hybridflow.environments.model_turn import ModelTurn
from hybridflow.environments.pool import EnvironmentPool
from hybridflow.environments.time_limits import LOOK_SECONDS, MOST_STARTS, TimeLimits
from hybridflow.errors import DataError, OtherConversation
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.row import RolloutRow
from hybridflow.rollout.rows import Branch, Message, ReplicaRows, Transcript, TurnCounts, TurnEvent, TurnRow
from hybridflow.rollout.tool_calls import Parsed, ToolCallParser
from hybridflow.rollout.turns import Episode

SECOND_CALL = "a turn may have one tool call: this one, behind the first, was not made"


class Continues(Protocol):
    """See `data.continuations.Continuations`."""

    @property
    def end(self) -> int: ...

    @property
    def takes_one_call(self) -> bool: ...

    @property
    def results_need_calls(self) -> bool: ...

    def call_id(self, name: str) -> str: ...

    def opening(self, fields: Mapping[str, Any]) -> str: ...

    def first_tokens(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> list[int]: ...

    def tokens(
        self, through: Sequence[Message], answers: Sequence[Message], fields: Mapping[str, Any], *, ended: int | None
    ) -> list[int]: ...


@dataclass
class Conversation:
    """What a class makes of a row. episode: what the row begins with. branch: the last sequence, which goes on.

    tickets: of the calls to the row's instance that are under way; start: of the first call. text: the last turn.
    last: the call that is under way ends the row. problem: why the row fails once the model has ended a turn.
    """

    record: TurnRow
    episode: Episode
    start: int = -1
    tickets: set[int] = field(default_factory=set)
    starts: int = 0
    text: str = ""
    last: bool = False
    problem: str = ""

    @property
    def branch(self) -> int:
        return len(self.record.branches) - 1

    @property
    def sequence(self) -> Branch:
        return self.record.branches[-1]

    @property
    def messages(self) -> list[Message]:
        return self.sequence.transcript.messages or []

    @property
    def used(self) -> int:
        """Tokens of the sequence that the row's prompt does not have."""
        return self.sequence.num_tokens - len(self.record.branches[0].prompt)


@dataclass(frozen=True)
class Environments:
    """What the rows of every rollout on this rank share. ends: tokens that end a turn. counts: of this rank."""

    pool: EnvironmentPool
    continues: Continues
    parser: ToolCallParser | None
    decode: Callable[[list[int]], str]
    ends: frozenset[int]
    rank: int
    counts: TurnCounts = field(default_factory=TurnCounts)

    @property
    def num_rewards(self) -> int:
        """Parts that a row is given."""
        return len(self.pool.config.weights)

    @property
    def several(self) -> bool:
        """Whether a row may have several sequences."""
        return self.pool.config.several

    def answers(self, rows: ReplicaRows) -> "Conversations":
        """Of the rows of a rollout, or of all partial ones."""
        return Conversations(self, rows)


class Conversations:
    """Of this rank's rows of one rollout, or of all partial ones."""

    def __init__(self, shared: Environments, rows: ReplicaRows) -> None:
        self._shared, self._pool, self._config, self._rows = shared, shared.pool, shared.pool.config, rows
        self._waiting = deque[Conversation]()  # rows that have not begun
        self._under_way: dict[int, Conversation] = {}  # by number
        self._by_ticket: dict[int, Conversation] = {}  # of calls under way
        self._failures, self._times = Failures(self._config, shared.rank), TimeLimits(self._config)

    # ---- as `rollout.turns.Answers`

    def admit(self, records: Sequence[TurnRow], episodes: Sequence[Episode]) -> None:
        self._waiting.extend(map(self._new, records, episodes))
        self._begin_waiting()

    def pause(self) -> None:
        self._pool.set_aside(self._by_ticket)
        self._times.pause()
        self._failures.end()

    def resume(self) -> None:
        self._pool.take_back(self._by_ticket)
        self._times.resume(conversation.record for conversation in self._under_way.values())
        self._failures = Failures(self._config, self._shared.rank)

    def abandon(self) -> None:
        self._pool.finish_all(conversation.record.worker for conversation in self._under_way.values())

    def on_turn_end(self, row: TurnRow, branch: int, turn: RolloutRow) -> None:
        conversation, token_ids, counts = self._under_way[row.number], turn.token_ids, self._shared.counts
        ended = token_ids[-1] if token_ids[-1] in self._shared.ends else None
        conversation.text = self._shared.decode(list(token_ids if ended is None else token_ids[:-1]))
        row.waiting_since = time.monotonic()
        counts.turns += 1
        parsed = Parsed(conversation.text, ()) if turn.truncated else self._parsed(conversation)
        counts.tool_calls += len(parsed.calls)
        conversation.last = conversation.used >= row.limit
        messages, cut = (
            [*conversation.messages, _message(parsed)],
            turn.truncated or (conversation.last and bool(parsed.calls)),
        )
        conversation.sequence.transcript = Transcript(messages, ended=ended, cut=cut, answered=True)
        if conversation.problem:
            self._fail(conversation, conversation.problem)
        else:
            self._call(conversation, "turn", calls=() if cut else [asdict(call) for call in parsed.calls])

    def work(self, *, wait: bool) -> None:
        while True:
            idle = wait and not self._rows.has_events
            for ticket, answer in self._pool.answers(LOOK_SECONDS if idle else 0.0).items():
                self._failures.show_printed(answer)
                if ticket in self._by_ticket:
                    self._take(self._by_ticket.pop(ticket), ticket, answer)
            if self._times.are_due():
                self._look_at_the_time()
            self._begin_waiting()
            if self._rows.has_events or not wait:
                return

    def end(self) -> None:
        self._failures.end()

    # ---- calls

    def _parsed(self, conversation: Conversation) -> Parsed:
        """A turn with ids for calls. A call too many is the model's mistake, and gets a result as any other."""
        parser, continues = self._shared.parser, self._shared.continues
        if parser is None:
            return Parsed(conversation.text, ())
        found = parser.parsed(conversation.text, continues.opening(conversation.record.columns))
        calls = [
            replace(
                call,
                id=call.id or continues.call_id(f"call_{conversation.record.turn}_{number}"),
                problem=call.problem or (SECOND_CALL if number and continues.takes_one_call else ""),
            )
            for number, call in enumerate(found.calls)
        ]
        return replace(found, calls=tuple(calls))

    def _new(self, record: TurnRow, episode: Episode) -> Conversation:
        record.columns, record.limit = episode.columns, episode.limit
        assert episode.messages is not None, "the prompt of a row with an environment is a conversation"
        record.branches[0].transcript = Transcript(list(episode.messages))
        return Conversation(record, episode)

    def _begin_waiting(self) -> None:
        """Rows begin when the engine has room for a turn, and the processes for an instance."""
        rows, most = self._rows, self._pool.most_at_once
        while self._waiting and len(self._under_way) < most and rows.num_speaking < rows.room:
            conversation = self._waiting.popleft()
            self._under_way[conversation.record.number] = conversation
            conversation.record.begun = time.monotonic()
            self._start(conversation)
            rows.apply(TurnEvent(conversation.record.number, max_tokens=self._turn_tokens(conversation, 0)))

    def _start(self, conversation: Conversation) -> None:
        """An instance."""
        record, conversation.starts = conversation.record, conversation.starts + 1
        record.worker, conversation.start = self._pool.start(record.columns, seed=conversation.episode.seed)
        self._expect(conversation, conversation.start)

    def _call(self, conversation: Conversation, kind: str, *, calls: Sequence[dict[str, Any]] = ()) -> None:
        record = conversation.record
        left = max(record.limit - conversation.used, 0)
        turn = ModelTurn(conversation.text, conversation.sequence.transcript.cut, record.turn, left, conversation.last)
        assert record.worker is not None, "an instance has been started"
        message = {"kind": kind, "row": record.worker, "said": tuple(vars(turn).values()), "calls": list(calls)}
        self._expect(conversation, self._pool.call(record.worker, message))

    def _expect(self, conversation: Conversation, ticket: int) -> None:
        conversation.tickets.add(ticket)
        self._by_ticket[ticket] = conversation

    def _take(self, conversation: Conversation, ticket: int, answer: Answer) -> None:
        conversation.tickets.discard(ticket)
        problem, record = answer.problem, conversation.record
        if ticket == conversation.start and not problem:
            if answer.value["messages"] != conversation.episode.messages:
                problem = "start gave other messages than before for the same row: it has to depend on the row alone"
        elif answer.lost and record.turn == 1 and record.waiting_since is None and conversation.starts < MOST_STARTS:
            self._start(conversation)  # the process has ended, and the instance had not heard of a turn
            return
        if problem and record.waiting_since is None:
            conversation.problem = problem  # the model speaks: the turn ends first
        elif problem:
            self._fail(conversation, problem)
        elif ticket != conversation.start:
            self._go_on(conversation, answer.value)

    def _go_on(self, conversation: Conversation, value: Mapping[str, Any]) -> None:
        record, sequence = conversation.record, conversation.sequence
        self._shared.counts.failed_calls += value.get("failed_calls", 0)
        if "reward" in value:
            rewards, cut = tuple(value["reward"]), sequence.transcript.cut
            self._end(conversation, TurnEvent(record.number, ends=True, truncated=cut, rewards=rewards))
            return
        if conversation.last:
            zeros = (0.0,) * len(self._config.weights)
            self._end(conversation, TurnEvent(record.number, ends=True, truncated=True, rewards=zeros))
            return
        answers = self._readable(conversation, value["messages"])
        try:
            branch, ids, used = self._behind(conversation, answers)
        except (DataError, OtherConversation) as error:
            self._fail(conversation, f"its messages cannot be read by the model: {error}")
            return
        if record.turn >= self._config.max_turns or used >= record.limit:
            conversation.last = True
            sequence.transcript = replace(sequence.transcript, cut=True)
            self._call(conversation, "step")
            return
        self._answered(conversation)
        messages = [*conversation.messages, *answers]
        self._rows.apply(TurnEvent(record.number, tuple(ids), self._turn_tokens(conversation, used), branch=branch))
        record.branches[branch].transcript = Transcript(messages)

    def _readable(self, conversation: Conversation, answers: Sequence[Message]) -> list[Message]:
        """A result of a call that cannot be read is the user's, where no result may stand without a call."""
        if conversation.messages[-1].get("tool_calls") or not self._shared.continues.results_need_calls:
            return list(answers)
        return [
            {"role": "user", "content": message["content"]} if message["role"] == "tool" else message
            for message in answers
        ]

    def _behind(self, conversation: Conversation, answers: Sequence[Message]) -> tuple[int, list[int], int]:
        """The sequence that goes on with these messages, the tokens that are new in it, and what is `used` with them.

        Errors: OtherConversation where the row may have one sequence alone; DataError where they can be no tokens of
        the model's.
        """
        continues, columns, transcript = (
            self._shared.continues,
            conversation.record.columns,
            conversation.sequence.transcript,
        )
        try:
            ids = continues.tokens(conversation.messages, answers, columns, ended=transcript.ended)
        except OtherConversation:
            if not self._shared.several:
                raise
            ids = continues.first_tokens([*conversation.messages, *answers], columns)
            return conversation.branch + 1, ids, len(ids) - len(conversation.record.branches[0].prompt)
        return conversation.branch, ids, conversation.used + len(ids)

    # ---- ends

    def _end(self, conversation: Conversation, event: TurnEvent) -> None:
        self._answered(conversation)
        for ticket in conversation.tickets:
            self._by_ticket.pop(ticket, None)
        if conversation.record.worker is not None:
            self._pool.finish(conversation.record.worker)
        self._under_way.pop(conversation.record.number, None)
        self._rows.apply(event)

    def _fail(self, conversation: Conversation, problem: str) -> None:
        """Errors: RewardError where that ends the run."""
        self._end(conversation, self._failures.event(conversation.record, problem))

    def _look_at_the_time(self) -> None:
        """Rows that wait and have no time left have failed; one that the model writes ends the turn first."""
        whole = self._times.rollout()
        for conversation in list(self._under_way.values()):
            late = whole or self._times.row(conversation.record.begun)
            if conversation.record.waiting_since is None:
                conversation.problem = conversation.problem or whole
            elif late:
                self._fail(conversation, late)
        while whole and self._waiting:  # no model computes a row without a token behind the prompt
            conversation = self._waiting.popleft()
            event = self._failures.event(conversation.record, whole)
            self._end(conversation, replace(event, token_ids=(self._shared.continues.end,)))

    # ---- inside

    def _turn_tokens(self, conversation: Conversation, used: int) -> int:
        left = conversation.record.limit - used
        return left if self._config.max_turn_tokens is None else min(left, self._config.max_turn_tokens)

    def _answered(self, conversation: Conversation) -> None:
        if conversation.record.waiting_since is not None:
            self._shared.counts.seconds += time.monotonic() - conversation.record.waiting_since
        conversation.record.waiting_since = None


def _message(parsed: Parsed) -> Message:
    """Of the assistant. Calls that cannot be read stay in the text."""
    readable = [call for call in parsed.calls if not call.problem]
    message: Message = {"role": "assistant", "content": parsed.content}
    if readable:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in readable
        ]
    return message
