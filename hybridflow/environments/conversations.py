"""The rows of a rollout in conversation with their environments: what each turn of the model is answered.

    conversations = Environments(pool, continuations, parser, ...).conversations(prompts, counts, limits, seed)

See `rollout.turns.Answers`. A turn goes to the row's instance: its tool calls, else `step`. What comes back is tokens
behind the turn, or a reward. A row that has no token or turn left for an answer is asked once more, with
`ModelTurn.truncated`: what is no number then is 0 in each part, and the row counts as truncated.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from hybridflow.batch import PromptBatch
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.environments.failures import Failures
from hybridflow.environments.model_turn import ModelTurn
from hybridflow.environments.pool import EnvironmentPool
from hybridflow.environments.time_limits import LOOK_SECONDS, MOST_STARTS, TimeLimits
from hybridflow.errors import DataError, OtherConversation
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.engine import Response
from hybridflow.rollout.rows import Message, ReplicaRows, RowRecord, RowSequence, Transcript, TurnEvent
from hybridflow.rollout.tool_calls import Parsed, ToolCallParser
from hybridflow.rollout.turns import TurnCounts

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
    """What a class makes of a row. branch: the last of the row's sequences, which goes on.

    tickets: of the calls to the row's instance that are under way; start: of its first call. text: the last turn.
    last: the call that is under way ends the row. problem: why the row fails once the model has ended a turn.
    """

    record: RowRecord
    start: int = -1
    tickets: set[int] = field(default_factory=set)
    starts: int = 0
    text: str = ""
    last: bool = False
    problem: str = ""

    @property
    def branch(self) -> int:
        return len(self.record.sequences) - 1

    @property
    def sequence(self) -> RowSequence:
        return self.record.sequences[-1]

    @property
    def messages(self) -> list[Message]:
        return self.sequence.transcript.messages or []

    @property
    def used(self) -> int:
        """Tokens of the sequence that the row's prompt does not have."""
        return self.sequence.num_tokens - len(self.record.sequences[0].prompt)


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

    def conversations(
        self, prompts: PromptBatch, counts: Tensor, limits: LengthBuckets[int], seed: Sequence[int]
    ) -> "Conversations":
        """Of a rollout with so many rows of each prompt. limits: tokens behind a prompt. seed: of the generation."""
        return Conversations(self, prompts, counts, limits, seed)


class Conversations:
    """Of this rank's rows of one rollout."""

    def __init__(
        self,
        shared: Environments,
        prompts: PromptBatch,
        counts: Tensor,
        limits: LengthBuckets[int],
        seed: Sequence[int],
    ) -> None:
        self._shared, self._pool, self._config = shared, shared.pool, shared.pool.config
        self._prompts, self._limits, self._seed = prompts, limits, tuple(seed)
        self._prompt_of = [prompt for prompt, count in enumerate(counts.tolist()) for _ in range(count)]
        self._waiting = deque[Conversation]()  # rows that have not begun
        self._under_way: dict[int, Conversation] = {}  # by number
        self._by_ticket: dict[int, Conversation] = {}  # of calls under way
        self._failures, self._times = Failures(self._config, shared.rank), TimeLimits(self._config)

    # ---- as `rollout.turns.Answers`

    def begin(self, rows: ReplicaRows) -> None:
        self._rows = rows
        self._waiting.extend(self._new(record) for record in rows.records)
        self._begin_waiting()

    def said(self, row: RowRecord, branch: int, turn: Response) -> None:
        its, token_ids, counts = self._under_way[row.number], turn.token_ids, self._shared.counts
        ended = token_ids[-1] if token_ids[-1] in self._shared.ends else None
        its.text = self._shared.decode(list(token_ids if ended is None else token_ids[:-1]))
        row.waiting_since = time.monotonic()
        counts.turns += 1
        parsed = Parsed(its.text, ()) if turn.truncated else self._parsed(its)
        counts.tool_calls += len(parsed.calls)
        its.last = its.used >= row.limit
        messages, cut = [*its.messages, _message(parsed)], turn.truncated or (its.last and bool(parsed.calls))
        its.sequence.transcript = Transcript(messages, ended=ended, cut=cut, answered=True)
        if its.problem:
            self._fail(its, its.problem)
        else:
            self._call(its, "turn", calls=() if cut else [asdict(call) for call in parsed.calls])

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

    def _parsed(self, its: Conversation) -> Parsed:
        """A turn with ids for its calls. A call too many is the model's mistake, and gets a result as any other."""
        parser, continues = self._shared.parser, self._shared.continues
        if parser is None:
            return Parsed(its.text, ())
        found = parser.parsed(its.text, continues.opening(its.record.columns))
        calls = [
            replace(
                call,
                id=call.id or continues.call_id(f"call_{its.record.turn}_{number}"),
                problem=call.problem or (SECOND_CALL if number and continues.takes_one_call else ""),
            )
            for number, call in enumerate(found.calls)
        ]
        return replace(found, calls=tuple(calls))

    def _new(self, record: RowRecord) -> Conversation:
        prompt = self._prompt_of[record.of_rollout]
        record.columns = {name: values[prompt] for name, values in self._prompts.columns.items()}
        record.limit = self._limits.at(int(self._prompts.lengths[prompt]))
        messages = self._prompts.conversations[prompt]
        assert messages is not None, "the prompt of a row with an environment is a conversation"
        record.sequences[0].transcript = Transcript(list(messages))
        return Conversation(record)

    def _begin_waiting(self) -> None:
        """Rows begin when the engine has room for a turn, and the processes for an instance."""
        rows, most = self._rows, self._pool.most_at_once
        while self._waiting and len(self._under_way) < most and rows.num_speaking < rows.room:
            its = self._waiting.popleft()
            self._under_way[its.record.number] = its
            its.record.begun = time.monotonic()
            self._start(its)
            rows.apply(TurnEvent(its.record.number, max_tokens=self._turn_tokens(its, 0)))

    def _start(self, its: Conversation) -> None:
        """An instance."""
        record, its.starts = its.record, its.starts + 1
        seed = ",".join(map(str, (*self._seed, self._prompt_of[record.of_rollout])))
        record.worker, its.start = self._pool.start(record.columns, seed=seed)
        self._expect(its, its.start)

    def _call(self, its: Conversation, kind: str, *, calls: Sequence[dict[str, Any]] = ()) -> None:
        record = its.record
        left = max(record.limit - its.used, 0)
        turn = ModelTurn(its.text, its.sequence.transcript.cut, record.turn, left, its.last)
        assert record.worker is not None, "an instance has been started"
        message = {"kind": kind, "row": record.worker, "said": tuple(vars(turn).values()), "calls": list(calls)}
        self._expect(its, self._pool.call(record.worker, message))

    def _expect(self, its: Conversation, ticket: int) -> None:
        its.tickets.add(ticket)
        self._by_ticket[ticket] = its

    def _take(self, its: Conversation, ticket: int, answer: Answer) -> None:
        its.tickets.discard(ticket)
        problem, record = answer.problem, its.record
        if ticket == its.start and not problem:
            if answer.value["messages"] != self._prompts.conversations[self._prompt_of[record.of_rollout]]:
                problem = "start gave other messages than before for the same row: it has to depend on the row alone"
        elif answer.lost and record.turn == 1 and record.waiting_since is None and its.starts < MOST_STARTS:
            self._start(its)  # the process has ended, and the instance had not heard of a turn
            return
        if problem and record.waiting_since is None:
            its.problem = problem  # the model speaks: its turn ends first
        elif problem:
            self._fail(its, problem)
        elif ticket != its.start:
            self._go_on(its, answer.value)

    def _go_on(self, its: Conversation, value: Mapping[str, Any]) -> None:
        record, sequence = its.record, its.sequence
        self._shared.counts.failed_calls += value.get("failed_calls", 0)
        if "reward" in value:
            rewards, cut = tuple(value["reward"]), sequence.transcript.cut
            self._end(its, TurnEvent(record.number, ends=True, truncated=cut, rewards=rewards))
            return
        if its.last:
            zeros = (0.0,) * len(self._config.weights)
            self._end(its, TurnEvent(record.number, ends=True, truncated=True, rewards=zeros))
            return
        answers = self._readable(its, value["messages"])
        try:
            branch, ids, used = self._behind(its, answers)
        except (DataError, OtherConversation) as error:
            self._fail(its, f"its messages cannot be read by the model: {error}")
            return
        if record.turn >= self._config.max_turns or used >= record.limit:
            its.last = True
            sequence.transcript = replace(sequence.transcript, cut=True)
            self._call(its, "step")
            return
        self._answered(its)
        messages = [*its.messages, *answers]
        self._rows.apply(TurnEvent(record.number, tuple(ids), self._turn_tokens(its, used), branch=branch))
        record.sequences[branch].transcript = Transcript(messages)

    def _readable(self, its: Conversation, answers: Sequence[Message]) -> list[Message]:
        """A result of a call that cannot be read is the user's, where no result may stand without a call."""
        if its.messages[-1].get("tool_calls") or not self._shared.continues.results_need_calls:
            return list(answers)
        return [
            {"role": "user", "content": message["content"]} if message["role"] == "tool" else message
            for message in answers
        ]

    def _behind(self, its: Conversation, answers: Sequence[Message]) -> tuple[int, list[int], int]:
        """The sequence that goes on with these messages, the tokens that are new in it, and what is `used` with them.

        Errors: OtherConversation where the row may have one sequence alone; DataError where they can be no tokens of
        the model's.
        """
        continues, columns, transcript = self._shared.continues, its.record.columns, its.sequence.transcript
        try:
            ids = continues.tokens(its.messages, answers, columns, ended=transcript.ended)
        except OtherConversation:
            if not self._shared.several:
                raise
            ids = continues.first_tokens([*its.messages, *answers], columns)
            return its.branch + 1, ids, len(ids) - len(its.record.sequences[0].prompt)
        return its.branch, ids, its.used + len(ids)

    # ---- ends

    def _end(self, its: Conversation, event: TurnEvent) -> None:
        self._answered(its)
        for ticket in its.tickets:
            self._by_ticket.pop(ticket, None)
        if its.record.worker is not None:
            self._pool.finish(its.record.worker)
        self._under_way.pop(its.record.number, None)
        self._rows.apply(event)

    def _fail(self, its: Conversation, problem: str) -> None:
        """Errors: RewardError where that ends the run."""
        self._end(its, self._failures.event(its.record, problem))

    def _look_at_the_time(self) -> None:
        """Rows that wait and have no time left have failed; one that the model writes ends its turn first."""
        whole = self._times.rollout()
        for its in list(self._under_way.values()):
            late = whole or self._times.row(its.record.begun)
            if its.record.waiting_since is None:
                its.problem = its.problem or whole
            elif late:
                self._fail(its, late)
        while whole and self._waiting:  # no model computes a row without a token behind the prompt
            its = self._waiting.popleft()
            event = self._failures.event(its.record, whole)
            self._end(its, replace(event, token_ids=(self._shared.continues.end,)))

    # ---- inside

    def _turn_tokens(self, its: Conversation, used: int) -> int:
        left = its.record.limit - used
        return left if self._config.max_turn_tokens is None else min(left, self._config.max_turn_tokens)

    def _answered(self, its: Conversation) -> None:
        if its.record.waiting_since is not None:
            self._shared.counts.seconds += time.monotonic() - its.record.waiting_since
        its.record.waiting_since = None


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
