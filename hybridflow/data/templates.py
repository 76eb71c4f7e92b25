"""The chat template of a tokenizer, and all that enters it beside the messages: tools and a config's own arguments.

    template = ChatTemplate(tokenizer, options)
    template.prompt(messages, row.fields, "a.jsonl, line 3: prompt")      # the assistant's turn begins at the end

What is rendered has to hold what was said: a message, a call of a tool or a tool that leaves no character is an error
with the name. See `message_parts`; `message_forms` has what templates differ in.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hybridflow.data.end_tokens import end_of_turn
from hybridflow.data.fields import KWARGS, TOOLS
from hybridflow.data.message_forms import MARK, REASONING, MessageForm, called_function, message_form
from hybridflow.data.message_parts import MessagePart, first_left_out
from hybridflow.data.messages import Format, Message
from hybridflow.data.rows import RowError, shown
from hybridflow.data.tokenizers import CONFIG
from hybridflow.errors import ConfigError
from hybridflow.formats.huggingface_files import TEMPLATES

KNOWN = "tools_are_known"  # of a template that renders no tools on purpose: the model knows them by training
ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")
# names that are not the template's: transformers gives them a meaning of their own
OF_TRANSFORMERS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"}
RESERVED = OF_TRANSFORMERS | {"messages"}
TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class TemplateOptions:
    """What the config's section `data` says of templates."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    form: Format = "openai"
    turns: Literal["auto", "together", "each"] = "auto"
    texts: bool = True  # whether a prompt may be a text, the user's message
    model_key: str = "actor.model"  # of the config, for messages


@dataclass(frozen=True)
class ChatTemplate:
    tokenizer: PreTrainedTokenizerBase
    options: TemplateOptions = TemplateOptions()

    def prompt(self, messages: Sequence[Message], fields: Mapping[str, Any], where: str) -> str:
        """What a run generates from. An assistant's message at the end is to be continued. Errors: RowError."""
        how, begun = self.arguments(fields, where), messages[-1]["role"] == "assistant"
        how["continue_final_message" if begun else "add_generation_prompt"] = True
        text = self._rendered(messages, where, how)
        self._check(text, messages, where, how)
        return self._with_beginning(text, messages, where, how) if begun else text

    def _with_beginning(self, text: str, messages: Sequence[Message], where: str, how: Mapping[str, Any]) -> str:
        """The text up to the end of the assistant's beginning, with the white space that a template has trimmed.

        Errors: RowError where the text does not end in the beginning.
        """
        last = self.as_read(messages)[-1]
        said = last["content"]
        if not isinstance(said, str) or any(last.get(key) for key in REASONING):
            return text
        before, mark, _ = self._rendered([*messages[:-1], {**last, "content": MARK}], where, how).rpartition(MARK)
        if mark and text.rstrip() == (before + said.strip()).rstrip():
            return before + said
        if said.strip() and text.rstrip().endswith(said.rstrip()):
            return text.rstrip() + said[len(said.rstrip()) :]
        raise RowError(
            f"{where}[{len(messages) - 1}].content = {shown(said)}: the chat template renders this beginning of the "
            f"assistant's otherwise, {shown(text[-len(said) :])}, and the model would go on from that",
            "not rendered",
        )

    def whole(
        self, messages: Sequence[Message], where: str, arguments: Mapping[str, Any], *, begins: bool = False
    ) -> str:
        """A conversation; begins: the assistant's turn begins at the end. Errors: RowError."""
        return self._rendered(messages, where, {**arguments, "add_generation_prompt": begins})

    def check_all_said(self, text: str, messages: Sequence[Message], where: str, arguments: Mapping[str, Any]) -> None:
        """Errors: RowError for the first message, call or tool of which `text` has nothing."""
        self._check(text, messages, where, arguments)

    def left_out(self, part: MessagePart, messages: Sequence[Message], where: str) -> RowError:
        """What to tell of a part that is not rendered."""
        message = messages[part.number]
        if part.path == ("content",):
            known = ", ".join(self._known_roles())
            return RowError(
                f"{where}[{part.number}]: the chat template leaves out this message of the role {message['role']!r}, "
                f"{shown(part.value)}; it renders messages of {known or 'no role alone'}",
                "not rendered",
            )
        return RowError(
            f"{part.described(where)}: the tokenizer's chat template leaves it out; give the tokenizer a template that "
            f"renders {part.path[0]}, or leave the key out",
            "not rendered",
        )

    def arguments(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Of a row: the tools, and the config's arguments, which the row's own replace. Errors: RowError."""
        own = _parsed(fields.get(KWARGS), f"{where}: {KWARGS}", dict) or {}
        for name in own:
            if name in RESERVED:
                raise RowError(f"{where}: {KWARGS}.{name}: is no argument of a chat template", "wrong type")
        found = {**self.options.kwargs, **own}
        tools = _parsed(fields.get(TOOLS), f"{where}: {TOOLS}", list)
        if tools:
            if TOOLS not in self.source(where, tools):
                raise _tools_unread(where)
            found[TOOLS] = tools
        return found

    @cached_property
    def form(self) -> MessageForm:
        """How the template takes reasoning and calls."""
        try:
            return message_form(self.tokenizer, self.source("", [{}]), _plainly_rendered)
        except RowError:
            return MessageForm()  # without a template, which the first row says

    def as_read(self, messages: Sequence[Message]) -> list[Message]:
        """As the template reads them."""
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        return self.form.as_read(plain) if any(message.keys() - _EVERYWHERE for message in plain) else plain

    def source(self, where: str, tools: list[Any] | None = None) -> str:
        """The template's text. Errors: RowError where there is none."""
        try:
            return self.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            why = error if self.tokenizer.chat_template else self._without_template()
            raise RowError(f"{where}: the tokenizer has no chat template: {why}", "no template") from error

    def _without_template(self) -> str:
        """What to do."""
        return (
            f"messages need one. Put the template in {self.tokenizer.name_or_path}/{TEMPLATE_FILE}, or give "
            f"{self.options.model_key} a model that has a template"
        )

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
            if name in RESERVED:
                raise ConfigError(f"data.chat_template_kwargs.{name}: is no argument of a chat template: leave it out")
            if name not in source:
                raise ConfigError(
                    f"data.chat_template_kwargs.{name}: the tokenizer's chat template does not read it: leave it out"
                )

    def _rendered(self, messages: Sequence[Message], where: str, how: Mapping[str, Any]) -> str:
        return self._render_as_read(self.as_read(messages), where, how)

    def _render_as_read(self, messages: list[Message], where: str, how: Mapping[str, Any]) -> str:
        try:
            if not self.tokenizer.chat_template:
                raise RowError(f"the tokenizer has no chat template: {self._without_template()}", "no template")
            return _by_template(self.tokenizer, messages, how)
        except RowError as error:
            raise RowError(f"{where}: {error}", error.reason) from error

    def _check(self, text: str, messages: Sequence[Message], where: str, how: Mapping[str, Any]) -> None:
        written = self.as_read(messages)
        part = first_left_out(
            text,
            written,
            lambda marked: self._render_as_read(marked, where, how),
            ended=lambda marked: self._render_as_read(marked, where, _without_beginning(how)),
        )
        if part is not None:
            raise self.left_out(part, written, where)
        self._check_tools(text, written, where, how)

    def _check_tools(self, text: str, written: list[Message], where: str, how: Mapping[str, Any]) -> None:
        """A name that a message has too says nothing of the tool: such names are looked for with a mark."""
        tools = how.get(TOOLS) or ()
        if tools and KNOWN in self.source(where, list(tools)):
            return
        names = [name for tool in tools if (name := _tool_name(tool))]
        if any(name not in text for name in names):
            raise _tools_unread(where)
        if any(name in (message["content"] or "") for message in written for name in names):
            marked = self._render_as_read(written, where, {**how, TOOLS: [_marked_tool(tool) for tool in tools]})
            if any(name + MARK not in marked for name in names):
                raise _tools_unread(where)

    def _known_roles(self) -> list[str]:
        found = []
        for role in ROLES:
            messages = [{"role": "user", "content": "?"}, {"role": role, "content": MARK}]
            try:
                rendered = self._rendered(messages[1:] if role in ("system", "user") else messages, "", {})
            except RowError:
                continue
            found += [role] if MARK in rendered else []
        return found


def template_file(tokenizer: PreTrainedTokenizerBase) -> str:
    """Where the template of a tokenizer stands."""
    directory = Path(tokenizer.name_or_path)
    found = (directory / name for name in (TEMPLATE_FILE, TEMPLATES, CONFIG) if (directory / name).exists())
    return str(next(found, "the tokenizer"))


_EVERYWHERE = {"role", "content", "name"}  # keys that all templates take alike


def _by_template(tokenizer: PreTrainedTokenizerBase, messages: list[Message], how: Mapping[str, Any]) -> str:
    """Errors: RowError."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **how)
    except Exception as error:  # a template is a program of the model's authors and raises what it likes
        raise RowError(f"the tokenizer's chat template cannot render it: {error}", "no template") from error
    assert isinstance(text, str), f"one conversation was rendered to {type(text).__name__}"
    return text


def _without_beginning(how: Mapping[str, Any]) -> dict[str, Any]:
    """What enters a template where no turn begins behind the last message."""
    return {name: value for name, value in how.items() if name not in OF_TRANSFORMERS or name == TOOLS}


def _plainly_rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Any] | None) -> str:
    return _by_template(tokenizer, messages, {} if tools is None else {TOOLS: tools})


def _tools_unread(where: str) -> RowError:
    return RowError(
        f"{where}: the row has tools, which the tokenizer's chat template does not read (a template whose model knows "
        f"its tools by training has {{%- set {KNOWN} = true -%}})",
        "tools",
    )


def _tool_name(tool: Any) -> str:
    """Nothing of a tool in a form that is not known here."""
    name = called_function(tool).get("name") if isinstance(tool, Mapping) else None
    return name if isinstance(name, str) else ""


def _marked_tool(tool: Any) -> Any:
    if not (name := _tool_name(tool)):
        return tool
    function = called_function(tool)
    marked = {**function, "name": name + MARK}
    return marked if function is tool else {**tool, "function": marked}


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
