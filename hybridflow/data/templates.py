"""The chat template of a tokenizer, and all that enters it beside the messages: tools and a config's own arguments.

    template = ChatTemplate(tokenizer, options)
    template.prompt(messages, row.fields, "a.jsonl, line 3: prompt")      # the assistant's turn begins at the end

What is rendered has to hold what was said: a message that leaves no character of its own is an error that names it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hybridflow.data.end_tokens import end_of_turn
from hybridflow.data.fields import KWARGS, TOOLS
from hybridflow.data.messages import Format, Message
from hybridflow.data.rows import RowError, shown
from hybridflow.errors import ConfigError

MARK = "\u2042hybridflow\u2042"  # that no template and no row has
ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")


@dataclass(frozen=True)
class TemplateOptions:
    """What the config's section `data` says of templates."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    form: Format = "openai"
    turns: Literal["auto", "together", "each"] = "auto"


@dataclass(frozen=True)
class ChatTemplate:
    tokenizer: PreTrainedTokenizerBase
    options: TemplateOptions = TemplateOptions()

    def prompt(self, messages: Sequence[Message], fields: Mapping[str, Any], where: str) -> str:
        """What a run generates from. An assistant's message at the end is to be continued. Errors: RowError."""
        arguments = self.arguments(fields, where)
        continues = messages[-1]["role"] == "assistant"
        how: dict[str, bool] = {"continue_final_message": True} if continues else {"add_generation_prompt": True}
        text = self._rendered(list(messages), where, **how, **arguments)
        self._check_all_said(text, list(messages), where, how | arguments)
        return text

    def whole(
        self, messages: Sequence[Message], where: str, arguments: Mapping[str, Any], *, begins: bool = False
    ) -> str:
        """A conversation; begins: the assistant's turn begins at the end. Errors: RowError."""
        return self._rendered(list(messages), where, add_generation_prompt=begins, **arguments)

    def check_all_said(self, text: str, messages: Sequence[Message], where: str, arguments: Mapping[str, Any]) -> None:
        """Errors: RowError for the first message of which `text` has nothing."""
        self._check_all_said(text, list(messages), where, dict(arguments))

    def arguments(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Of a row: its tools, and the config's arguments with the row's own in their place. Errors: RowError."""
        own = _parsed(fields.get(KWARGS), f"{where}: {KWARGS}", dict)
        found = {**self.options.kwargs, **(own or {})}
        tools = _parsed(fields.get(TOOLS), f"{where}: {TOOLS}", list)
        if tools:
            if TOOLS not in self.source(where, tools):
                raise RowError(
                    f"{where}: the row has tools, which the tokenizer's chat template does not read", "tools"
                )
            found[TOOLS] = tools
        return found

    def source(self, where: str, tools: list[Any] | None = None) -> str:
        """The template's text. Errors: RowError where there is none."""
        try:
            return self.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise RowError(f"{where}: the tokenizer has no chat template: {error}", "no template") from error

    @cached_property
    def end_of_turn(self) -> str | None:
        """The special token that ends what the assistant says, as text."""
        found = end_of_turn(self.tokenizer)
        token = None if found is None else self.tokenizer.convert_ids_to_tokens(found)
        return token if isinstance(token, str) else None

    def check_options(self) -> None:
        """Errors: ConfigError for an argument of the config that the template does not read."""
        try:
            source = self.source("")
        except RowError:
            return  # the first row says so
        for name in self.options.kwargs:
            if name not in source:
                raise ConfigError(
                    f"data.chat_template_kwargs.{name}: the tokenizer's chat template does not read it: leave it out"
                )

    def _rendered(self, messages: list[Message], where: str, **how: Any) -> str:
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(plain, tokenize=False, **how)
        except Exception as error:  # a template is a program of the model's authors and raises what it likes
            raise RowError(
                f"{where}: the tokenizer's chat template cannot render it: {error}", "no template"
            ) from error
        assert isinstance(text, str), f"one conversation was rendered to {type(text).__name__}"
        return text

    def _check_all_said(self, text: str, messages: list[Message], where: str, how: dict[str, Any]) -> None:
        place = 0
        for number, message in enumerate(messages):
            said = message["content"].strip()
            at = text.find(said, place) if said else place
            # what another message says too may be found where that one says it
            told_apart = not any(said in other["content"] for other in messages if said and other is not message)
            if at >= 0 and told_apart:
                place = at + len(said)
                continue
            if not self._leaves_a_mark(messages, number, where, how):
                known = ", ".join(self._known_roles())
                raise RowError(
                    f"{where}[{number}]: the chat template leaves out this message of the role {message['role']!r}, "
                    f"{shown(said)}; it renders messages of {known or 'no role alone'}",
                    "not rendered",
                )

    def _leaves_a_mark(self, messages: list[Message], number: int, where: str, how: dict[str, Any]) -> bool:
        """Whether what a message says is rendered at all: a template may cut it, or write it otherwise."""
        marked = [dict(message) for message in messages]
        marked[number]["content"] += MARK
        return MARK in self._rendered(marked, where, **how)

    def _known_roles(self) -> list[str]:
        found = []
        for role in ROLES:
            messages = [{"role": "user", "content": "?"}, {"role": role, "content": MARK}]
            try:
                rendered = self._rendered(messages[1:] if role in ("system", "user") else messages, "")
            except RowError:
                continue
            found += [role] if MARK in rendered else []
        return found


def _parsed(value: Any, where: str, kind: type) -> Any:
    """A value, or the JSON text of one, as data sets have it in Parquet. Errors: RowError where it is another thing."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"{where} = {shown(value)} is a text that is not JSON: {error}", "wrong type") from error
    if value is None or value == "":
        return None
    if not isinstance(value, kind):
        raise RowError(
            f"{where} = {shown(value)} is a {type(value).__name__}, expected a {kind.__name__}", "wrong type"
        )
    return value
