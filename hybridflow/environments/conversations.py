"""The rows of a rollout in conversation with their environments: what each turn of the model is answered.

    conversations = Environments(pool, continuations, parser, ...).conversations(prompts, counts, limits, seed)

See `rollout.turns.Answers`. A turn goes to the row's instance: its tool calls, else `step`. What comes back is tokens
behind the turn, or a reward. A row that has no token or turn left for an answer is asked once more, with
`ModelTurn.truncated`: what is no number then is 0 in each part, and the row counts as truncated.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from hybridflow.batch import PromptBatch
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.environments.failures import Failures
from hybridflow.environments.model_turn import ModelTurn
from hybridflow.environments.pool import EnvironmentPool
from hybridflow.environments.time_limits import TimeLimits
from hybridflow.errors import DataError, OtherConversation
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.tool_calls import Parsed, ToolCallParser
from hybridflow.rollout.turns import TurnCounts, TurnEvent

Message = dict[str, Any]
SECOND_CALL = "a turn may have one tool call: this one, behind the first, was not made"
LOOK_SECONDS = 0.1  # between two looks at the time limit of rows, while all of them wait


class Continues(Protocol):
    """See `data.continuations.Continuations`."""

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
    """One row. instance: its number in the pool. used: tokens behind the prompt. begun: when, on the clock.

    branch: the last of its sequences, which goes on. prompt: tokens of the row's; of a further sequence `used` counts
    those that it has more.
    asked: when the call that is under way began; None while the model speaks. cut: the last turn has met a limit.
    last: the call that is under way ends the row.
    """

    row: int  # of the rollout
    columns: Mapping[str, Any]
    messages: list[Message]
    limit: int
    instance: int
    start: int  # the ticket of its first call
    begun: float
    prompt: int
    used: int = 0
    branch: int = 0
    turn: int = 0
    ended: int | None = None  # the token by which the model has ended its last turn
    text: str = ""
    asked: float | None = None
    cut: bool = False
    last: bool = False
    problem: str = ""


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
        self._rows: list[Conversation] = []
        self._by_ticket: dict[int, int] = {}  # of calls under way, whose row
        self._ready: list[TurnEvent] = []
        self._failures, self._times = Failures(self._config, shared.rank), TimeLimits(self._config)

    # ---- as `rollout.turns.Answers`

    def begin(self, rows: Sequence[int]) -> list[int]:
        self._rows = [self._begun(row) for row in rows]
        self._by_ticket = {its.start: number for number, its in enumerate(self._rows)}
        return [self._turn_tokens(its) for its in self._rows]

    def said(
        self, row: int, token_ids: Sequence[int], log_probs: Sequence[float], *, truncated: bool, branch: int = 0
    ) -> None:
        its = self._rows[row]
        its.turn, its.used = its.turn + 1, its.used + len(token_ids)
        its.ended = token_ids[-1] if token_ids[-1] in self._shared.ends else None
        its.text = self._shared.decode(list(token_ids if its.ended is None else token_ids[:-1]))
        its.asked = time.monotonic()
        self._shared.counts.turns += 1
        parsed = Parsed(its.text, ()) if truncated else self._parsed(its)
        its.messages = [*its.messages, _message(parsed)]
        self._shared.counts.tool_calls += len(parsed.calls)
        its.last = its.used >= its.limit
        its.cut = truncated or (its.last and bool(parsed.calls))
        if its.problem:
            self._fail(row, its.problem)
        else:
            self._call(row, "turn", calls=() if its.cut else [asdict(call) for call in parsed.calls])

    def replies(self, *, wait: bool) -> list[TurnEvent]:
        while True:
            for ticket, answer in self._pool.answers(LOOK_SECONDS if wait and not self._ready else 0.0).items():
                self._failures.show_printed(answer)
                if ticket in self._by_ticket:
                    self._take(self._by_ticket.pop(ticket), ticket, answer)
            self._look_at_the_time()
            if self._ready or not wait:
                found, self._ready = self._ready, []
                return found

    def end(self) -> None:
        self._failures.end()

    # ---- calls

    def _parsed(self, its: Conversation) -> Parsed:
        """A turn with ids for its calls. A call too many is the model's mistake, which is told as any other."""
        parser, continues = self._shared.parser, self._shared.continues
        if parser is None:
            return Parsed(its.text, ())
        found = parser.parsed(its.text, continues.opening(its.columns))
        calls = [
            replace(
                call,
                id=call.id or continues.call_id(f"call_{its.turn}_{number}"),
                problem=call.problem or (SECOND_CALL if number and continues.takes_one_call else ""),
            )
            for number, call in enumerate(found.calls)
        ]
        return replace(found, calls=tuple(calls))

    def _begun(self, row: int) -> Conversation:
        prompt = self._prompt_of[row]
        columns = {name: values[prompt] for name, values in self._prompts.columns.items()}
        messages = self._prompts.conversations[prompt]
        assert messages is not None, "the prompt of a row with an environment is a conversation"
        seed = ",".join(map(str, (*self._seed, prompt)))
        instance, ticket = self._pool.start(columns, seed=seed)
        length = int(self._prompts.lengths[prompt])
        limit, now = self._limits.for_length(length), time.monotonic()
        return Conversation(row, columns, list(messages), limit, instance, ticket, now, length)

    def _call(self, row: int, kind: str, *, calls: Sequence[dict[str, Any]] = ()) -> None:
        its = self._rows[row]
        said = ModelTurn(its.text, its.cut, its.turn, max(its.limit - its.used, 0), its.last)
        message = {"kind": kind, "row": its.instance, "said": tuple(vars(said).values()), "calls": list(calls)}
        self._by_ticket[self._pool.call(its.instance, message)] = row

    def _take(self, row: int, ticket: int, answer: Answer) -> None:
        its = self._rows[row]
        problem = answer.problem
        begins = ticket == its.start and not problem
        if begins and answer.value["messages"] != self._prompts.conversations[self._prompt_of[its.row]]:
            problem = "start gave other messages than before for the same row: it has to depend on the row alone"
        if problem and its.asked is None:
            its.problem = problem  # the model speaks: its turn ends first
        elif problem:
            self._fail(row, problem)
        elif ticket != its.start:
            self._go_on(row, answer.value)

    def _go_on(self, row: int, value: Mapping[str, Any]) -> None:
        its = self._rows[row]
        self._shared.counts.failed_calls += value.get("failed_calls", 0)
        if "reward" in value:
            self._end(row, TurnEvent(row, ends=True, truncated=its.cut, rewards=tuple(value["reward"])))
            return
        if its.last:
            zeros = (0.0,) * len(self._config.weights)
            self._end(row, TurnEvent(row, ends=True, truncated=True, rewards=zeros))
            return
        answers = self._readable(its, value["messages"])
        try:
            branch, ids, used = self._behind(its, answers)
        except (DataError, OtherConversation) as error:
            self._fail(row, f"its messages cannot be read by the model: {error}")
            return
        if its.turn >= self._config.max_turns or used >= its.limit:
            its.last = its.cut = True
            self._call(row, "step")
            return
        its.messages, its.branch, its.used = [*its.messages, *answers], branch, used
        self._answered(its)
        self._ready.append(TurnEvent(row, tuple(ids), self._turn_tokens(its), branch=branch))

    def _readable(self, its: Conversation, answers: Sequence[Message]) -> list[Message]:
        """What is told of a call that cannot be read is the user's, where no result may stand without a call."""
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
        continues, branch, before = self._shared.continues, its.branch, its.used
        try:
            ids = continues.tokens(its.messages, answers, its.columns, ended=its.ended)
        except OtherConversation:
            if not self._shared.several:
                raise
            ids = continues.first_tokens([*its.messages, *answers], its.columns)
            branch, before = its.branch + 1, -its.prompt
        return branch, ids, before + len(ids)

    # ---- ends

    def _end(self, row: int, reply: TurnEvent) -> None:
        its = self._rows[row]
        self._answered(its)
        self._pool.finish(its.instance)
        self._ready.append(reply)

    def _fail(self, row: int, problem: str) -> None:
        """Errors: RewardError where that ends the run."""
        its = self._rows[row]
        reply = self._failures.reply(row, its.row, its.turn, problem)
        self._by_ticket = {ticket: other for ticket, other in self._by_ticket.items() if other != row}
        self._end(row, reply)

    def _look_at_the_time(self) -> None:
        """Rows that wait and have no time left have failed; one that the model writes ends its turn first."""
        whole = self._times.rollout()
        for row, its in enumerate(self._rows):
            if its.asked is None:
                its.problem = its.problem or whole
            elif late := whole or self._times.row(its.begun):
                self._fail(row, late)

    # ---- inside

    def _turn_tokens(self, its: Conversation) -> int:
        left = its.limit - its.used
        return left if self._config.max_turn_tokens is None else min(left, self._config.max_turn_tokens)

    def _answered(self, its: Conversation) -> None:
        if its.asked is not None:
            self._shared.counts.seconds += time.monotonic() - its.asked
        its.asked = None


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
