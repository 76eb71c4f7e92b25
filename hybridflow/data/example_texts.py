"""Rows of fixed data as texts: the formats of TRL's and verl's data sets, known by the kinds of their fields.

| kind | fields |
|---|---|
| sft | `messages`; or `prompt` and `completion` |
| pairs | `chosen` and `rejected`, with a `prompt` or beginning alike; optionally `margin` |
| labelled | `prompt`, `completion` and `label` |

A prompt and what follows it are both texts, both lists of messages, or both token ids. Where chosen and rejected have
no prompt before them, what both begin with is the prompt, as in TRL: the messages, or the characters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hybridflow.data.chat import Rendered, render_chats
from hybridflow.data.messages import Message, check_encodable, is_conversation, is_token_ids, read_messages
from hybridflow.data.rows import Row, RowError, shown
from hybridflow.data.templates import ChatTemplate, TemplateOptions

Kind = Literal["sft", "pairs", "labelled"]  # labelled: completions that are wanted or not, as KTO has them


@dataclass(frozen=True)
class Plain:
    prompt: str | list[int]
    completion: str | list[int]  # of the same kind


@dataclass(frozen=True)
class ExampleTexts:
    where: str
    sequences: tuple[Plain | Rendered, ...]
    label: bool
    margin: float
    repeats_prompt: bool = False  # what follows the prompt begins with the prompt itself


def example_texts(
    row: Row, kind: Kind, tokenizer: PreTrainedTokenizerBase, options: TemplateOptions | None = None
) -> ExampleTexts:
    """Errors: RowError naming the field, the value and the rule."""
    options = options or TemplateOptions()
    if kind != "sft":  # of which a row is one completion, or two
        options = replace(options, turns="together")
    reader = _Reader(row, ChatTemplate(tokenizer, options))
    sequences: tuple[Plain | Rendered, ...]
    match kind:
        case "sft" if "messages" in row.fields:
            sequences = reader.conversation("messages")
        case "sft" | "labelled":
            sequences = reader.sequence("prompt", "completion")
        case "pairs" if "prompt" not in rendered_columns(row.fields, kind):
            sequences = reader.implicit()
        case "pairs":
            sequences = (*reader.sequence("prompt", "chosen"), *reader.sequence("prompt", "rejected"))
    return ExampleTexts(
        row.where,
        sequences,
        label=_label(reader) if kind == "labelled" else True,
        margin=_margin(row) if kind == "pairs" and "margin" in row.fields else 0.0,
        repeats_prompt=any(reader.repeats_prompt(name) for name in ("completion", "chosen")),
    )


def rendered_columns(fields: Mapping[str, Any], kind: Kind) -> list[str]:
    """Those of a row that become tokens. chosen and rejected hold the prompt where none is given, or a text alone."""
    if kind != "pairs":
        return ["messages"] if kind == "sft" and "messages" in fields else ["prompt", "completion"]
    prompt = fields.get("prompt")
    if prompt is None or (isinstance(prompt, str) and is_conversation(fields.get("chosen"))):
        return ["chosen", "rejected"]
    return ["prompt", "chosen", "rejected"]


@dataclass(frozen=True)
class _Reader:
    row: Row
    template: ChatTemplate

    def field(self, name: str) -> Any:
        fields = self.row.fields
        if name not in fields:
            there = f"its fields are {', '.join(fields) or 'none'}; data.columns says which of them stands for it"
            raise RowError(f"{self.row.where}: has no field {name!r}; {there}", f"no {name}")
        return fields[name]

    def where(self, name: str) -> str:
        return f"{self.row.where}: {name}"

    def sequence(self, first: str, then: str) -> tuple[Plain | Rendered, ...]:
        prompt, completion = (self._read(name) for name in (first, then))
        if _kind_of(prompt) != _kind_of(completion):
            raise RowError(
                f"{self.row.where}: {first} is {_kind_of(prompt)} and {then} is {_kind_of(completion)}, expected the "
                f"same of both",
                "wrong type",
            )
        if is_conversation(prompt):
            return self._rendered([*prompt, *completion], then, len(prompt))
        return (Plain(prompt, completion),)

    def conversation(self, name: str, first: int = 0) -> tuple[Rendered, ...]:
        messages = read_messages(self.field(name), self.where(name), self.template.options.form)
        return self._rendered(messages, name, first)

    def _rendered(self, messages: Sequence[Message], name: str, first: int) -> tuple[Rendered, ...]:
        found = tuple(render_chats(messages, self.template, self.where(name), fields=self.row.fields, first=first))
        for one in found:
            check_encodable(one.text, self.where(name))
        return found

    def repeats_prompt(self, name: str) -> bool:
        """Whether the field `name` begins with the row's prompt, so that the model reads the prompt twice."""
        prompt, then = (self.row.fields.get(field) for field in ("prompt", name))
        if (isinstance(prompt, str) and isinstance(then, str)) or (isinstance(prompt, list) and isinstance(then, list)):
            return bool(prompt) and then[: len(prompt)] == prompt
        return False

    def implicit(self) -> tuple[Plain | Rendered, ...]:
        values: list[Any] = [self._read("chosen"), self._read("rejected")]
        if _kind_of(values[0]) != _kind_of(values[1]):
            raise RowError(
                f"{self.row.where}: chosen is {_kind_of(values[0])} and rejected is {_kind_of(values[1])}", "wrong type"
            )
        self._check_first_message(values[0])
        length = num_alike(*values)
        if isinstance(values[0], str) and values[0][:length].endswith(" "):
            length -= 1  # a space belongs to the word after it
        if not length or length == min(map(len, values)):
            what = "begin with nothing in common" if not length else "differ in nothing, or in that one ends"
            raise RowError(f"{self.row.where}: without a prompt, chosen and rejected {what}", "no prompt")
        if is_conversation(values[0]):
            return tuple(one for name in ("chosen", "rejected") for one in self.conversation(name, first=length))
        return tuple(Plain(value[:length], value[length:]) for value in values)

    def _check_first_message(self, chosen: Any) -> None:
        prompt = self.row.fields.get("prompt")
        if prompt is not None and all(message["content"] != prompt for message in chosen):
            raise RowError(
                f"{self.row.where}: prompt = {shown(prompt)} is a text, but chosen is a list of messages without this "
                "text",
                "wrong type",
            )

    def _read(self, name: str) -> Any:
        """A text, a list of messages, or token ids (which are checked against the vocabulary later on)."""
        value = self.field(name)
        if is_token_ids(value):
            return value
        if isinstance(value, list):
            return read_messages(value, self.where(name), self.template.options.form)
        if not isinstance(value, str):
            raise RowError(
                f"{self.where(name)} = {shown(value)} is a {type(value).__name__}, expected a text, a list of messages "
                f"or token ids",
                "wrong type",
            )
        if not value:
            raise RowError(f"{self.where(name)} = '' is empty", "empty")
        check_encodable(value, self.where(name))
        return value


def num_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Characters, messages or token ids that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _kind_of(value: Any) -> str:
    if isinstance(value, str):
        return "a text"
    return "token ids" if is_token_ids(value) else "a list of messages"


def _label(reader: _Reader) -> bool:
    value = reader.field("label")
    if type(value) is not bool and (type(value) is not int or value not in (0, 1)):
        raise RowError(f"{reader.where('label')} = {shown(value)}, expected true or false", "wrong type")
    return bool(value)


def _margin(row: Row) -> float:
    value = row.fields["margin"]
    if type(value) not in (int, float) or not abs(value) < float("inf"):
        raise RowError(f"{row.where}: margin = {shown(value)}, expected a finite number", "wrong type")
    return float(value)
