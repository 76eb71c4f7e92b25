"""What follows a turn of the model in a conversation, as tokens of its own: nothing sampled is encoded again.

    continuations.tokens(messages, answers, fields, ended=True)     # of "\n<|im_start|>user\nno<|im_end|>\n..."

It is the chat template's text of the whole conversation less that of the conversation through the model's turn, cut
right behind the special token that ends the turn. A template that renders an earlier turn in another way than the model
has written it (as one that leaves out earlier thinking does) is refused, unless `data.environment.earlier_turns` says
otherwise. keep: the tokens stay as they were sampled. branch: whoever asks begins another sequence, with all of the
conversation as the template has it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridflow.data.messages import Message, check_encodable, check_token_ids
from hybridflow.data.rows import RowError
from hybridflow.data.templates import ChatTemplate
from hybridflow.errors import ConfigError, OtherConversation

EarlierTurns = Literal["refuse", "keep", "branch"]
SAID = "hybridflow"  # what the assistant says where a template is tried
THOUGHT = f"<think>\n{SAID}\n</think>\n\n{SAID}"
WHERE = "data.environment"


@dataclass(frozen=True)
class Continuations:
    """Of one template and its arguments. Errors when it is made: ConfigError where the template cannot be used.

    schemas: of the environment's tools. earlier_turns: what happens where the template renders one in another way.
    vocab_size: the model knows the tokens below it.
    """

    template: ChatTemplate
    schemas: Sequence[Mapping[str, Any]]
    end: int  # the token that ends a turn
    earlier_turns: EarlierTurns
    vocab_size: int = sys.maxsize

    @classmethod
    def of(
        cls,
        template: ChatTemplate,
        schemas: Sequence[Mapping[str, Any]],
        end: int | None,
        *,
        earlier_turns: EarlierTurns = "refuse",
    ) -> "Continuations":
        name = template.tokenizer.name_or_path
        if end is None:
            raise ConfigError(
                f"{WHERE}: the chat template of {name} ends what the assistant says by no special token, so that a "
                f"turn cannot be told from what follows"
            )
        made = cls(template, tuple(schemas), end, earlier_turns)
        if earlier_turns == "refuse":
            made._check(name)
        return made

    def arguments(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Of the template, for a row. Errors: RowError where the template reads no tools."""
        return self.template.arguments(self.fields(fields), WHERE)

    def fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a row, with the environment's tools in place of any that it has."""
        rest = {name: value for name, value in fields.items() if name != "tools"}
        return {**rest, "tools": [dict(schema) for schema in self.schemas]} if self.schemas else rest

    def with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> "Continuations":
        """The same where a row has tools of its own."""
        return replace(self, schemas=tuple(schemas))

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
        self, through: Sequence[Message], answers: Sequence[Message], fields: Mapping[str, Any], *, ended: bool
    ) -> list[int]:
        """What the environment writes behind the model's last turn, up to the beginning of its next.

        through: the conversation, that turn included. ended: it has the token that ends a turn; else that comes first.
        Errors: OtherConversation where an earlier turn is rendered in another way; RowError as `first_tokens`.
        """
        ids = self._encoded(self._text(through, answers, self.arguments(fields)))
        assert ids[0] == self.end, f"a continuation begins with the token {ids[0]}, not with the end {self.end}"
        return ids[1:] if ended else ids

    def _text(self, through: Sequence[Message], answers: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        end = self._end
        head = self.template.whole(through, WHERE, arguments)
        whole = self.template.whole([*through, *answers], WHERE, arguments, begins=True)
        before = head[: head.rindex(end)]
        if self.earlier_turns == "branch" and not before.startswith(
            self.template.whole(through[:-1], WHERE, arguments, begins=True)
        ):
            raise self._rewrites("a turn of the assistant in another way than it lets a run begin one")
        if whole.startswith(before + end):
            return whole[len(before) :]
        if self.earlier_turns != "keep":
            raise self._rewrites("an earlier turn of the assistant in another way once more messages follow")
        parts = whole.split(end)
        return end + end.join(parts[head.count(end) :])

    @property
    def _end(self) -> str:
        text = self.template.tokenizer.convert_ids_to_tokens(self.end)
        assert isinstance(text, str), f"the token {self.end} is one"
        return text

    def _check(self, name: str) -> None:
        """By a small conversation. Errors: ConfigError."""
        ask = [{"role": "user", "content": "?"}]
        more = [{"role": "user", "content": "!"}]
        try:
            arguments = self.arguments({})
            thinks = "</think>" in self.template.source(WHERE, arguments.get("tools"))
            for said in (SAID, THOUGHT) if thinks else (SAID,):
                turn = [*ask, {"role": "assistant", "content": said}]
                if not thinks and not self.template.whole(turn, WHERE, arguments).startswith(
                    self.template.whole(ask, WHERE, arguments, begins=True)
                ):
                    raise self._rewrites("a turn of the assistant in another way than it lets a run begin one")
                self._text(turn, more, arguments)
        except RowError as error:
            raise ConfigError(f"{WHERE}: the chat template of {name} cannot be used: {error}") from error

    def _rewrites(self, what: str) -> ConfigError:
        return OtherConversation(
            f"{WHERE}: the chat template of {self.template.tokenizer.name_or_path} renders {what}: the model would be "
            f"trained on conversations that it never sees. Give the model's tokenizer a template that keeps earlier "
            f"turns, or set data.environment.earlier_turns: keep, with which they stay as they were sampled, or "
            f"earlier_turns: branch, with which each such turn begins another sequence of the row"
        )
