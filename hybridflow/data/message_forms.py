"""How a chat template takes what a message has beside the content: reasoning, calls of tools and their ids.

    form = message_form(tokenizer, template, render)
    form.as_read(messages)          # the same messages, as this template reads them

Templates differ: one reads `reasoning_content` and another `thinking`; one iterates over arguments and another joins
them as text; one has no place for calls unless the content is null; Mistral's want ids of nine letters and digits. The
form of a template is found by rendering small conversations. Messages in a form that the template takes stay as they
are.
"""

import hashlib
import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridflow.data.messages import Message
from hybridflow.data.rows import RowError

REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field
MARK = "\u2042hybridflow\u2042"  # that no template and no row has
LETTERS = string.ascii_letters + string.digits
NUM_LETTERS = 9  # of an id, where a template is strict
Render = Callable[[list[Message]], str]  # Errors: RowError


@dataclass(frozen=True)
class MessageForm:
    """reasoning: names that the template reads. objects, texts: kinds of arguments that it takes.

    null_content: the content beside calls is null, else the calls are left out. short_ids: ids have nine letters and
    digits. single_call: a message has one call at most. result_needs_call: no result is rendered without one.
    """

    reasoning: tuple[str, ...] = ()
    objects: bool = True
    texts: bool = True
    null_content: bool = False
    short_ids: bool = False
    single_call: bool = False
    result_needs_call: bool = False

    def as_read(self, messages: Sequence[Message]) -> list[Message]:
        """As the template reads them. Messages that it reads as they are stay the same objects."""
        found, open_ids = [], list[str]()  # of calls that no result has answered
        for number, message in enumerate(messages):
            new = self._with_reasoning(message)
            if message.get("tool_calls"):
                new = self._with_calls(new, number)
                open_ids = [call["id"] for call in new["tool_calls"] if isinstance(call, dict) and "id" in call]
            elif message["role"] == "tool" and self.short_ids:
                new = {**new, "tool_call_id": _result_id(message, open_ids, number)}
            found.append(new)
        return found

    def call_id(self, name: str) -> str:
        """An id of a call that the template takes, a function of the name."""
        return short_id(name) if self.short_ids else name

    def _with_reasoning(self, message: Message) -> Message:
        given = [name for name in REASONING if isinstance(message.get(name), str)]
        if not given or not self.reasoning or any(name in self.reasoning for name in given):
            return message
        rest = {key: value for key, value in message.items() if key not in given}
        return {**rest, self.reasoning[0]: message[given[0]]}

    def _with_calls(self, message: Message, number: int) -> Message:
        calls = message["tool_calls"]
        if isinstance(calls, list):
            calls = [
                self._call(call, f"{number},{i}") if isinstance(call, dict) else call for i, call in enumerate(calls)
            ]
        content = None if self.null_content and not message["content"] else message["content"]
        return {**message, "tool_calls": calls, "content": content}

    def _call(self, call: dict[str, Any], name: str) -> dict[str, Any]:
        named = {**call, "id": short_id(call.get("id") or name)} if self.short_ids else call
        function = called_function(call)
        arguments = self._arguments(function.get("arguments"))
        if arguments is function.get("arguments"):
            return named
        if function is call:
            return {**named, "arguments": arguments}
        return {**named, "function": {**function, "arguments": arguments}}

    def _arguments(self, given: Any) -> Any:
        if isinstance(given, str) and self.objects and not self.texts:
            try:
                return json.loads(given or "{}")
            except ValueError:
                return given  # the template says what is wrong with them
        if isinstance(given, Mapping) and self.texts and not self.objects:
            return json.dumps(given, ensure_ascii=False)
        return given


def called_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a call that has a name and arguments."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def short_id(name: str) -> str:
    """Nine letters and digits; a name of that form is already an id."""
    if len(name) == NUM_LETTERS and all(letter in LETTERS for letter in name):
        return name
    number = int.from_bytes(hashlib.blake2b(str(name).encode(errors="replace"), digest_size=8).digest(), "big")
    return "".join(LETTERS[number // len(LETTERS) ** place % len(LETTERS)] for place in range(NUM_LETTERS))


def _result_id(message: Message, open_ids: list[str], number: int) -> str:
    """The id of the call that a message answers: the message's id, or the next open id."""
    given = message.get("tool_call_id")
    if isinstance(given, str) and given:
        return short_id(given)
    return open_ids.pop(0) if open_ids else short_id(f"{number}")


# ------------------------------------------------------------------------------------------------ found by trying


@lru_cache(maxsize=16)
def message_form(tokenizer: PreTrainedTokenizerBase, template: str, render: Callable[..., str]) -> MessageForm:
    """Of a template. render: (tokenizer, messages, tools) -> text. Errors of the template: such a form is not taken."""

    def shows(messages: Sequence[Message], *marks: str) -> bool:
        for tools in (None, [SCHEMA]) if "tools" in template else (None,):
            try:
                text = render(tokenizer, list(messages), tools)
            except RowError:
                continue
            if all(mark in text for mark in marks):
                return True
        return False

    said = {"role": "assistant", "content": "!"}
    plain = MessageForm()
    reasoning = tuple(name for name in REASONING if shows([USER, {**said, name: MARK}], MARK))
    for null, short, as_text in product((False, True), repeat=3):
        form = MessageForm(reasoning, not as_text, as_text, null, short)
        if not _shows_calls(shows, form, 1):
            continue
        if not as_text:
            form = replace(form, texts=_shows_calls(shows, replace(form, objects=False, texts=True), 1))
        result = {"role": "tool", "tool_call_id": short_id(""), "name": "none", "content": MARK}
        alone = shows([USER, said, result], MARK)
        return replace(form, single_call=not _shows_calls(shows, form, 2), result_needs_call=not alone)
    return replace(plain, reasoning=reasoning)  # without calls: a conversation with calls is an error


USER: Message = {"role": "user", "content": "?"}
SCHEMA = {
    "type": "function",
    "function": {"name": "none", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def _shows_calls(shows: Callable[..., bool], form: MessageForm, count: int) -> bool:
    """Whether a message with so many calls is rendered whole, with their results or without."""
    marks = [f"{MARK}{what}{i}" for i in range(count) for what in ("name", "key", "value")]
    calls = [
        {
            "id": f"call_0_{i}",
            "type": "function",
            "function": {"name": f"{MARK}name{i}", "arguments": {f"{MARK}key{i}": f"{MARK}value{i}"}},
        }
        for i in range(count)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_0_{i}", "name": f"{MARK}name{i}", "content": "!"} for i in range(count)
    ]
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    return any(shows(form.as_read(messages), *marks) for messages in ([*talk, *results], talk))
