"""Whether a rendered text has all that messages say: contents, reasoning, and names and arguments of tool calls.

    part = first_left_out(text, messages, render)       # None where nothing is left out

A content that the text has once, and no other message has, is there. Everything else is looked for by a mark: the
messages are rendered once more with a mark behind each part. A template may cut what was said or write it in another
way: then the mark is there all the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.data.message_forms import MARK, REASONING, Render, called_function
from hybridflow.data.messages import Message
from hybridflow.data.rows import RowError, shown

Path = tuple[str | int, ...]  # of keys, from a message to a part of it


@dataclass(frozen=True)
class MessagePart:
    """number: of the message. path: of the part in it."""

    number: int
    path: Path
    value: Any

    @property
    def is_reasoning(self) -> bool:
        return self.path[0] in REASONING

    def described(self, where: str) -> str:
        """Where the part stands, for a person."""
        keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return f"{where}[{self.number}]{keys} = {shown(self.value)}"


def first_left_out(
    text: str, messages: Sequence[Message], render: Render, *, first: int = 0, ended: Render | None = None
) -> MessagePart | None:
    """The first part of messages, from number `first` on, of which `text` has nothing.

    render: makes the text. ended: makes the text of a conversation that ends with the last message; default: `render`.
    Reasoning counts as rendered if the template has the reasoning while the message is the last.
    """
    suspects, place = [], 0
    for number, message in enumerate(messages[first:], start=first):
        for part in _parts(number, message):
            at = text.find(part.value, place) if part.path == ("content",) else -1
            if at >= 0 and text.count(part.value) == 1 and not _said_by_another(part, messages):
                place = at + len(part.value)
            else:
                suspects.append(part)
    for part in _without_mark(suspects, messages, render):
        if not _without_mark([part], messages, render):
            continue  # beside the other marks alone
        if part.is_reasoning and not _without_mark([part], messages[: part.number + 1], ended or render):
            continue  # earlier thinking, which many templates leave out
        return part
    return None


def _parts(number: int, message: Message) -> list[MessagePart]:
    content = (message["content"] or "").strip()
    found = [MessagePart(number, ("content",), content)] if content else []
    found += [
        MessagePart(number, (name,), message[name])
        for name in REASONING
        if isinstance(message.get(name), str) and message[name].strip()
    ][:1]
    calls = message.get("tool_calls")
    for i, call in enumerate(calls if isinstance(calls, list) else ()):
        if not isinstance(call, dict):
            continue
        function: Any = called_function(call)
        path: Path = ("tool_calls", i, "function") if function is not call else ("tool_calls", i)
        if isinstance(function.get("name"), str):
            found.append(MessagePart(number, (*path, "name"), function["name"]))
        found += [
            MessagePart(number, (*path, "arguments", *keys), leaf) for keys, leaf in _leaves(function.get("arguments"))
        ]
    return found


def _leaves(value: Any) -> list[tuple[Path, Any]]:
    """Texts within arguments, by their keys, or a text alone. Numbers and the like go with their keys."""
    if isinstance(value, dict):
        return [((key, *keys), leaf) for key, inner in value.items() for keys, leaf in _leaves(inner)]
    if isinstance(value, list):
        return [((i, *keys), leaf) for i, inner in enumerate(value) for keys, leaf in _leaves(inner)]
    return [] if value is None else [((), value)]


def _said_by_another(part: MessagePart, messages: Sequence[Message]) -> bool:
    return any(part.value in (other["content"] or "") for number, other in enumerate(messages) if number != part.number)


def _without_mark(parts: Sequence[MessagePart], messages: Sequence[Message], render: Render) -> list[MessagePart]:
    """The parts of which nothing is rendered. No part where a template refuses marks: nothing is known then."""
    if not parts:
        return []
    marked: list[Message] = list(messages)
    for i, part in enumerate(parts):
        behind = _behind(f"{MARK}{i};")
        marked[part.number] = _changed(marked[part.number], part.path, behind)
    try:
        text = render(marked)
    except RowError:
        return [] if len(parts) == 1 else [part for part in parts if _without_mark([part], messages, render)]
    return [part for i, part in enumerate(parts) if f"{MARK}{i};" not in text]


def _behind(mark: str) -> Callable[[Any], Any]:
    return lambda value: f"{value}{mark}"


def _changed(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy with another value at the path."""
    if not path:
        return change(value)
    key: Any = path[0]
    if isinstance(value, list):
        return [_changed(inner, path[1:], change) if i == key else inner for i, inner in enumerate(value)]
    return {**value, key: _changed(value[key], path[1:], change)}
