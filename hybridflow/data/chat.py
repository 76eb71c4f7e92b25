"""Conversations as texts, by the tokenizer's chat template, and which characters of them the assistant says.

    render_chats(messages, template, "a.jsonl, line 3: messages")[0].spans

The template may mark them itself, by {% generation %}. Otherwise what comes before a message of the assistant, with the
prompt to generate, has to be the beginning of the conversation through that message, and this the beginning of the
whole; the message is what lies between. Where a template renders the past in another way than the present (as one that
leaves out earlier thinking does), each message is one sequence, with the past as it is at that turn: what a
run generates from. `data.assistant_turns` chooses: auto, together, or each.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hybridflow.data.message_forms import REASONING
from hybridflow.data.messages import Message, is_trained_on
from hybridflow.data.rows import RowError, shown
from hybridflow.data.templates import ChatTemplate

RENDER: Any = render_jinja_template  # annotated as a function that gives a text
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
UNCLEAR_TURN = "not told apart"


@dataclass(frozen=True)
class Rendered:
    text: str  # up to the end of what the assistant says last, and the token that ends it
    spans: tuple[tuple[int, int], ...]  # characters, [start, end), that count


def render_chats(
    messages: Sequence[Message],
    template: ChatTemplate,
    field: str,
    *,
    fields: Mapping[str, Any] | None = None,
    first: int = 0,
) -> list[Rendered]:
    """With what the assistant says from message number `first` on: one sequence, or one a turn. Errors: RowError.

    fields: of the row, whose tools enter the template.
    """
    arguments = template.arguments(fields or {}, field)
    marked = MARKED.search(template.source(field, arguments.get("tools"))) is not None
    said = _trained_numbers(messages, field, first)
    turns = template.options.turns
    if (turns == "each" or not marked) and said[0] == 0:
        said = said[1:]  # what nobody has asked for is context: a run generates nothing behind an empty prompt
        if not said:
            raise RowError(
                f"{field}[0] is the assistant's, and no other message of the assistant follows", "no assistant"
            )
    if turns == "each":
        return _by_turn(messages, template, field, said, arguments)
    if marked:
        return [_by_marks(messages, template, field, said, arguments)]
    try:
        return [_by_prefix(messages, template, field, said, arguments)]
    except RowError as error:
        if turns == "together" or error.reason != UNCLEAR_TURN:
            raise
        return _by_turn(messages, template, field, said, arguments)


def _trained_numbers(messages: Sequence[Message], field: str, first: int) -> list[int]:
    """Numbers of the messages that are trained on. Errors: RowError where there is none, or one says nothing."""
    said = [
        i
        for i, message in enumerate(messages)
        if i >= first and message["role"] == "assistant" and is_trained_on(message, f"{field}[{i}]")
    ]
    if not said:
        raise RowError(f"{field}: has no message of the assistant to be trained on", "no assistant")
    for i in said:
        if not any(str(messages[i].get(key) or "").strip() for key in ("content", "tool_calls", *REASONING)):
            raise RowError(
                f"{field}[{i}].content = {messages[i]['content']!r} is empty: an answer of the assistant needs a text; "
                f"weight: 0 leaves the answer untrained",
                "empty",
            )
    return said


def _by_marks(
    messages: Sequence[Message],
    template: ChatTemplate,
    field: str,
    said: Sequence[int],
    arguments: Mapping[str, Any],
) -> Rendered:
    try:
        texts, spans = RENDER(
            [template.as_read(messages)],
            chat_template=template.source(field, arguments.get("tools")),
            return_assistant_tokens_mask=True,
            **template.tokenizer.special_tokens_map,
            **arguments,
        )
    except Exception as error:  # as in `ChatTemplate`
        raise RowError(f"{field}: the tokenizer's chat template cannot render it: {error}", "no template") from error
    marked = [(start, end) for start, end in spans[0] if end > start]
    of_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans[0]) != len(of_assistant) or not marked:
        raise RowError(
            f"{field}: the chat template marks {len(spans[0])} parts by {{% generation %}}, the assistant has "
            f"{len(of_assistant)} messages",
            "no template",
        )
    template.check_all_said(texts[0], messages, field, arguments)
    kept = [(start, end) for i, (start, end) in zip(of_assistant, spans[0], strict=True) if i in said]
    return _cut(Rendered(texts[0], tuple(kept)), template)


def _by_prefix(
    messages: Sequence[Message],
    template: ChatTemplate,
    field: str,
    said: Sequence[int],
    arguments: Mapping[str, Any],
) -> Rendered:
    whole = template.whole(messages, field, arguments)
    template.check_all_said(whole, messages, field, arguments)
    spans = []
    for i in said:
        span, through = _turn(messages, template, field, i, arguments)
        if not whole.startswith(through):
            raise _unclear_turn(field, i, "the conversation up to it otherwise once more messages follow")
        spans.append(span)
    return _cut(Rendered(whole, tuple(spans)), template)


def _by_turn(
    messages: Sequence[Message],
    template: ChatTemplate,
    field: str,
    said: Sequence[int],
    arguments: Mapping[str, Any],
) -> list[Rendered]:
    """A sequence of each turn, with the past as the template has it there."""
    found = []
    for i in said:
        span, through = _turn(messages, template, field, i, arguments)
        template.check_all_said(through, messages[: i + 1], field, arguments)
        found.append(_cut(Rendered(through, (span,)), template))
    return found


def _turn(
    messages: Sequence[Message], template: ChatTemplate, field: str, number: int, arguments: Mapping[str, Any]
) -> tuple[tuple[int, int], str]:
    """(characters of a message of the assistant, the conversation through it)."""
    before = template.whole(messages[:number], field, arguments, begins=True)
    through = template.whole(messages[: number + 1], field, arguments)
    if not through.startswith(before):
        what = f"the message otherwise than it lets a run begin one, {shown(before[-40:])}"
        raise _unclear_turn(field, number, what)
    said = _without_tail(through[len(before) :], template.tokenizer)
    return (len(before), len(before) + len(said)), through


def _unclear_turn(field: str, number: int, what: str) -> RowError:
    return RowError(
        f"{field}[{number}]: which tokens are the assistant's cannot be told: the chat template renders {what}; give "
        f"the tokenizer a template with {{% generation %}} marks",
        UNCLEAR_TURN,
    )


def _without_tail(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """What a run would generate: nothing after the end token, such as the line break of many templates."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(tuple(tokenizer.get_added_vocab())) else text


def _cut(found: Rendered, template: ChatTemplate) -> Rendered:
    """Without what follows the last span: a run's responses end with their end token, and scores are read there.

    Where a template's marks leave out the end token it stays, since a response has it.
    """
    end, token = max(stop for _, stop in found.spans), template.end_of_turn
    if token is not None and not found.text[:end].endswith(token) and found.text[end:].lstrip().startswith(token):
        end = found.text.index(token, end) + len(token)
    return Rendered(found.text[:end], found.spans)
