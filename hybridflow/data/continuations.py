"""The tokens that follow a turn of the model in a conversation: nothing sampled is encoded again.

    continuations.tokens(messages, answers, fields, ended=end_id)     # of "\n<|im_start|>user\nno<|im_end|>\n..."

See `turn_ends` for where the turn ends in the template's text. A template that renders an earlier turn in another way
than the model has written it (as one that leaves out earlier thinking does) is refused, unless
`data.environment.earlier_turns` says otherwise. keep: the tokens stay as they were sampled. branch: whoever asks begins
another sequence, with all of the conversation as the template has it. Whatever it says, the text behind the turn has
all that was answered: a message that the template leaves out, or writes before the turn, is an error.
"""

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybridflow.data.message_parts import first_left_out
from hybridflow.data.messages import Message, check_encodable, check_token_ids
from hybridflow.data.rows import RowError
from hybridflow.data.templates import ChatTemplate
from hybridflow.data.tokenizers import is_special
from hybridflow.data.turn_ends import Behind, TurnEnds
from hybridflow.errors import ConfigError, OtherConversation

EarlierTurns = Literal["refuse", "keep", "branch"]
SAID = "hybridflow"  # what the assistant says where a template is tried
THOUGHT = f"<think>\n{SAID}\n</think>\n\n{SAID}"
WHERE = "data.environment"
WINDOW_FROM, LAST_TURNS = 8, 4  # turns: from so many on the last ones are rendered alone
ASK, MORE = [{"role": "user", "content": "?"}], [{"role": "user", "content": "!"}]


@dataclass(frozen=True)
class Continuations:
    """Of one template with arguments. `from_template` raises ConfigError where the template cannot be used.

    schemas: of the environment's tools. end: a token that ends a turn. earlier_turns: what happens where the template
    renders one in another way. vocab_size: the model knows the tokens below it. turn_ends: see there.
    """

    template: ChatTemplate
    schemas: Sequence[Mapping[str, Any]]
    end: int
    earlier_turns: EarlierTurns
    turn_ends: TurnEnds
    vocab_size: int = sys.maxsize
    misread: list[str] = field(default_factory=list)  # why a template has to be given whole conversations

    @classmethod
    def from_template(
        cls,
        template: ChatTemplate,
        schemas: Sequence[Mapping[str, Any]],
        end: int | None,
        *,
        earlier_turns: EarlierTurns = "refuse",
        ends: Sequence[int] = (),
    ) -> "Continuations":
        """end: which the template writes behind a turn; None where the next role's token ends it, one of `ends`."""
        name, turn_ends = template.tokenizer.name_or_path, TurnEnds(template, WHERE, writes_end=end is not None)
        try:
            if end is None:
                end = _of_next_role(turn_ends, name, ends)
            made = cls(template, tuple(schemas), end, earlier_turns, turn_ends)
            made._check()
        except RowError as error:
            why = str(error).removeprefix(f"{WHERE}: ")
            raise ConfigError(f"{WHERE}: the chat template of {name} cannot be used: {why}") from error
        return made

    @property
    def takes_one_call(self) -> bool:
        """Whether a turn may have one call of a tool at most."""
        return self.template.form.single_call

    @property
    def results_need_calls(self) -> bool:
        """Whether a message of the role tool has to follow a call."""
        return self.template.form.result_needs_call

    def call_id(self, name: str) -> str:
        """An id of a tool call that the template takes."""
        return self.template.form.call_id(name)

    def arguments(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Of the template, for a row. Errors: RowError where the template reads no tools."""
        return self.template.arguments(self.fields(fields), WHERE)

    def fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a row, with the environment's tools in place of any that it has."""
        rest = {name: value for name, value in fields.items() if name != "tools"}
        return {**rest, "tools": [dict(schema) for schema in self.schemas]} if self.schemas else rest

    def with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> "Continuations":
        """The same with the tools of one row."""
        return replace(self, schemas=tuple(schemas))

    def opening(self, fields: Mapping[str, Any]) -> str:
        """A text behind which a turn begins, such as one that ends in <think>; nothing where the template fails."""
        try:
            return self.template.whole(ASK, WHERE, self.arguments(fields), begins=True)
        except RowError:
            return ""

    def first_tokens(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> list[int]:
        """What the model goes on from in a new conversation.

        Errors: RowError where the template fails, or a text holds what is no character or no token of the model's.
        """
        return self._encoded(self.template.prompt(messages, self.fields(fields), "messages"))

    def _encoded(self, text: str) -> list[int]:
        """Errors: RowError where the text holds what is no character, or no token of the model's."""
        check_encodable(text, "the text")
        ids: list[int] = self.template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        check_token_ids(ids, "the text", self.vocab_size)
        return ids

    def tokens(
        self, through: Sequence[Message], answers: Sequence[Message], fields: Mapping[str, Any], *, ended: int | None
    ) -> list[int]:
        """What the environment writes behind the model's last turn, up to the beginning of the model's next turn.

        through: the conversation, that turn included. ended: the token by which the model has ended the turn; None
        where it has not, and the template's end comes first. Errors: OtherConversation where an earlier turn is
        rendered in another way; RowError as `first_tokens`.
        """
        arguments = self.arguments(fields)
        behind = self._said_behind(self._window(through, answers, arguments), answers, arguments)
        ids = self._encoded(behind.text)
        stands_in = behind.has_end or ids[:1] == [ended]
        return ids[1:] if ended is not None and stands_in else ids

    def _window(
        self, through: Sequence[Message], answers: Sequence[Message], arguments: Mapping[str, Any]
    ) -> Sequence[Message]:
        """As much of a long conversation as the text behind its last turn depends on.

        To render all of it with each turn would be work that grows with the square. With turns 8, 16, 32, ... all is
        rendered, and compared: a template that looks further back is given whole conversations from then on. Errors:
        RowError where earlier turns of the row were rendered without what such a template reads.
        """
        window, turns = recent(through), _num_turns(through)
        if len(window) == len(through) or self.misread:
            return through
        if turns.bit_count() > 1:
            return window
        if self._behind_or_none(window, answers, arguments) != self._behind_or_none(through, answers, arguments):
            self.misread.append(f"turn {turns} depends on more than the last turns")
            if turns > WINDOW_FROM:
                raise RowError("the chat template renders a turn by messages far back: later rows are whole", "window")
        return through

    def _behind_or_none(
        self, through: Sequence[Message], answers: Sequence[Message], arguments: Mapping[str, Any]
    ) -> Behind | None:
        """None: another conversation."""
        try:
            return self._behind(through, answers, arguments)
        except OtherConversation:
            return None

    def _said_behind(
        self, through: Sequence[Message], answers: Sequence[Message], arguments: Mapping[str, Any]
    ) -> Behind:
        """Errors: as `tokens`."""
        found, messages = self._behind(through, answers, arguments), [*through, *answers]

        def render(marked: list[Message]) -> str:
            return self._behind(marked[: len(through)], marked[len(through) :], arguments).text

        written = self.template.as_read(messages)
        part = first_left_out(found.text, written, render, first=len(through))
        if part is None:
            return found
        problem = self.template.left_out(part, written, "messages")
        if self.earlier_turns == "branch":
            raise OtherConversation(str(problem))  # the whole conversation may have it, before the turn
        raise RowError(f"{problem}; or renders it before the model's turn: earlier_turns: branch", problem.reason)

    def _behind(self, through: Sequence[Message], answers: Sequence[Message], arguments: Mapping[str, Any]) -> Behind:
        if self.earlier_turns == "keep":
            return self.turn_ends.text_behind_kept(through, answers, arguments)
        if self.earlier_turns == "branch" and not self.turn_ends.begins_as_a_run(through, arguments):
            raise self._rewrites("a turn of the assistant in another way than it lets a run begin one")
        found = self.turn_ends.text_behind(through, answers, arguments)
        if found is None:
            raise self._rewrites("an earlier turn of the assistant in another way once more messages follow")
        return found

    def _check(self) -> None:
        """By small conversations. Errors: ConfigError; RowError."""
        arguments = self.arguments({})
        turn = {"role": "assistant", "content": SAID}
        try:
            if self.earlier_turns == "refuse":
                self._check_rewrites(arguments)
            else:
                self._said_behind([*ASK, turn], MORE, arguments)
            for schema in self.schemas[:1]:
                self._said_behind(*self._call_of(schema), arguments)
        except OtherConversation:
            if self.earlier_turns != "branch":
                raise

    def _check_rewrites(self, arguments: Mapping[str, Any]) -> None:
        thinks = "</think>" in self.template.source(WHERE, arguments.get("tools"))
        for said in (SAID, THOUGHT) if thinks else (SAID,):
            turn = [*ASK, {"role": "assistant", "content": said}]
            if not thinks and not self.turn_ends.begins_as_a_run(turn, arguments):
                raise self._rewrites("a turn of the assistant in another way than it lets a run begin one")
            self._said_behind(turn, MORE, arguments)

    def _call_of(self, schema: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
        """A conversation with a call of a tool, and the call's result."""
        name, own = schema["function"]["name"], self.call_id("call_0_0")
        call = {"id": own, "type": "function", "function": {"name": name, "arguments": {}}}
        result = {"role": "tool", "name": name, "tool_call_id": own, "content": SAID}
        return [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], [result]

    def _rewrites(self, what: str) -> ConfigError:
        return OtherConversation(
            f"{WHERE}: the chat template of {self.template.tokenizer.name_or_path} renders {what}: the model would be "
            f"trained on conversations that it never sees. Give the model's tokenizer a template that keeps earlier "
            f"turns, or set data.environment.earlier_turns: keep, with which they stay as they were sampled, or "
            f"earlier_turns: branch, with which each such turn begins another sequence of the row"
        )


def _num_turns(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def recent(through: Sequence[Message]) -> list[Message]:
    """What comes before the first turn, that turn, the one before the last user's message, and the last ones.

    A turn goes with the messages that answer it, so that roles follow each other as in the whole.
    """
    starts = [number for number, message in enumerate(through) if message["role"] == "assistant"]
    if len(starts) < WINDOW_FROM:
        return list(through)
    last_user = max((number for number, message in enumerate(through) if message["role"] == "user"), default=0)
    kept = {0, max(bisect_right(starts, last_user) - 1, 0), *range(len(starts) - LAST_TURNS, len(starts))}
    ends = [*starts[1:], len(through)]
    return [*through[: starts[0]], *(each for turn in sorted(kept) for each in through[starts[turn] : ends[turn]])]


def _of_next_role(turn_ends: TurnEnds, name: str, ends: Sequence[int]) -> int:
    """The first token of the next message, where the model ends a turn by this token. Errors: ConfigError."""
    tokenizer = turn_ends.template.tokenizer
    none = f"{WHERE}: the chat template of {name} ends what the assistant says by no special token"
    behind = turn_ends.text_behind_kept([*ASK, {"role": "assistant", "content": SAID}], MORE, {})
    ids: list[int] = tokenizer(behind.text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids or not is_special(ids[0], tokenizer):
        raise ConfigError(f"{none}, so that a turn cannot be told from what follows")
    if ids[0] not in ends:
        token = tokenizer.convert_ids_to_tokens(ids[0])
        raise ConfigError(
            f"{none}, and {token!r} of the next message is no end token of the model's: name token {ids[0]} in "
            f"eos_token_id of generation_config.json"
        )
    return ids[0]
