"""Where a turn of the model ends in the text of a chat template, found by the template's own text.

A turn ends with a special token of the template's (`<|im_end|>`), or where the next message begins with a role's token
(`<|user|>` of GLM). Two ways lead there:

- `text_behind`: the conversation through the turn is rendered, and so are turn and answers. The first text begins the
  second, and the rest of the second follows the turn. None where the second text begins otherwise.
- `text_behind_kept`: the template renders the turn with a mark, alone and with the answers. What is behind the mark
  alone is the turn's own, and the rest follows. What the model has said has no part in it: the model may have written
  an end token out as text, and a template may leave thinking out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridflow.data.message_forms import REASONING, called_function
from hybridflow.data.messages import Message
from hybridflow.data.rows import RowError
from hybridflow.data.templates import ChatTemplate

MARK = "\u2042turn\u2042"  # that no template and no row has
SAID = "hybridflow"


@dataclass(frozen=True)
class Behind:
    """The text behind a turn. has_end: it begins with the token by which the template ends the turn."""

    text: str
    has_end: bool


@dataclass(frozen=True)
class TurnEnds:
    """Of a template. writes_end: it writes a special token behind a turn that is the last message."""

    template: ChatTemplate
    where: str
    writes_end: bool = True

    def text_behind(
        self, through: Sequence[Message], answers: Sequence[Message], arguments: Mapping[str, Any]
    ) -> Behind | None:
        """None where the template renders what is before the answers in another way. Errors: RowError."""
        head = self.template.whole(through, self.where, arguments)
        whole = self.template.whole([*through, *answers], self.where, arguments, begins=True)
        own, end = self._cut(head)
        return Behind(whole[len(own) :], bool(end)) if whole.startswith(own + end) else None

    def begins_as_a_run(self, through: Sequence[Message], arguments: Mapping[str, Any]) -> bool:
        """Whether the last turn's text begins with what a run would have generated from. Errors: RowError."""
        own, _ = self._cut(self.template.whole(through, self.where, arguments))
        return own.startswith(self.template.whole(through[:-1], self.where, arguments, begins=True))

    def text_behind_kept(
        self, through: Sequence[Message], answers: Sequence[Message], arguments: Mapping[str, Any]
    ) -> Behind:
        """Errors: RowError."""
        for marked in _marked(through):
            head = self.template.whole(marked, self.where, arguments)
            whole = self.template.whole([*marked, *answers], self.where, arguments, begins=True)
            if MARK in head and MARK in whole:
                return self._behind_mark(head.partition(MARK)[2], whole.partition(MARK)[2])
        return self._behind_end(head, whole)

    def _behind_mark(self, alone: str, followed: str) -> Behind:
        """Of what stands behind the mark."""
        own, end = self._cut(alone)
        own = own if followed.startswith(own) else own.rstrip()  # of a line break that the last message alone has
        if not followed.startswith(own):
            raise RowError(
                f"{self.where}: the chat template renders a turn of the assistant in another way once more messages "
                f"follow, so that the end of the turn cannot be found",
                "not rendered",
            )
        rest = followed[len(own) :]
        has_end = bool(end) and rest.startswith((end, self._end_of_messages or end))
        return Behind(rest.replace(MARK, ""), has_end)  # a template may name a call again with the result

    def _behind_end(self, head: str, whole: str) -> Behind:
        """Of a template that leaves earlier turns out: the text behind as many end tokens as are in `head`."""
        _, end = self._cut(head)
        parts = whole.split(end, head.count(end)) if end else []
        if not end or len(parts) <= head.count(end):
            raise RowError(f"{self.where}: the chat template leaves out a turn of the assistant", "not rendered")
        return Behind(end + parts[-1], has_end=True)

    def _cut(self, text: str) -> tuple[str, str]:
        """(a text without the special token at the end, the token); no token where the template writes none."""
        stripped = text.rstrip()
        ending = [token for token in self._special if stripped.endswith(token)] if self.writes_end else []
        end = max(ending, key=len, default="")
        return (stripped.removesuffix(end), end) if end else (text, "")

    @cached_property
    def _special(self) -> list[str]:
        tokenizer = self.template.tokenizer
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        return [token for token in {*added, *map(str, tokenizer.all_special_tokens)} if token]

    @cached_property
    def _end_of_messages(self) -> str:
        """The special token that ends a user's message: some templates end the last turn alone by another one."""
        try:
            text = self.template.whole([{"role": "user", "content": MARK}], self.where, {})
        except RowError:
            return ""
        own, end = self._cut(text.partition(MARK)[2])
        return "" if own.strip() else end


def _marked(through: Sequence[Message]) -> list[list[Message]]:
    """The conversation with a mark in the last turn: at the name of the last call, or in place of the content."""
    *before, last = (_neutral(message) for message in through)
    found, calls = [], last.get("tool_calls")
    if isinstance(calls, list) and calls:
        *others, call = calls
        function = called_function(call)
        marked: dict[str, Any] = {**function, "name": f"{function.get('name')}{MARK}"}
        call = marked if function is call else {**call, "function": marked}
        found.append([*before, {**last, "tool_calls": [*others, call]}])
    return [*found, [*before, {**last, "content": MARK}]]


def _neutral(message: Message) -> Message:
    """A turn without what the model has said in it."""
    if message["role"] != "assistant":
        return message
    rest = {key: value for key, value in message.items() if key not in REASONING}
    return {**rest, "content": SAID if message["content"] else message["content"]}
