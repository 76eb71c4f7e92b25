"""Conversations as texts, by the tokenizer's chat template, and which characters of them the assistant says.

    rendered(messages, tokenizer, "a.jsonl, line 3: messages").spans

The template may mark them itself, by {% generation %}. Otherwise what comes before a message of the assistant, with the
prompt to generate, has to be the beginning of the conversation through that message, and this the beginning of the
whole; the message is what lies between. Where a template renders the past in another way than the present (as one that
leaves out earlier thinking does), neither holds, and the row is refused: training would be on another text than a run
generates from.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hybridflow.data.rows import RowError, shown

Message = dict[str, Any]
RENDER: Any = render_jinja_template  # its annotation says that it gives a text
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: tuple[tuple[int, int], ...]  # characters, [start, end), that count


def rendered(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, field: str, *, first: int = 0
) -> Rendered:
    """With what the assistant says from message number `first` on. Errors: RowError."""
    said = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    if not said:
        raise RowError(f"{field}: has no message of the assistant to be trained on", "no assistant")
    if MARKED.search(_template(tokenizer, field)):
        return _by_marks(list(messages), tokenizer, field, said=said)
    return _by_prefix(list(messages), tokenizer, field, said=said)


def render(messages: list[Message], tokenizer: PreTrainedTokenizerBase, field: str, *, prompts: bool) -> str:
    """prompts: whether the assistant's turn begins at the end."""
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompts, tokenize=False)
    except Exception as error:  # a template is a program of the model's authors and raises what it likes
        raise RowError(f"{field}: the tokenizer's chat template cannot render it: {error}", "no template") from error
    assert isinstance(text, str), f"one conversation was rendered to {type(text).__name__}"
    return text


def _template(tokenizer: PreTrainedTokenizerBase, field: str) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise RowError(f"{field}: the tokenizer has no chat template: {error}", "no template") from error


def _by_marks(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, field: str, *, said: Sequence[int]
) -> Rendered:
    try:
        texts, spans = RENDER(
            [messages],
            chat_template=_template(tokenizer, field),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # as in `render`
        raise RowError(f"{field}: the tokenizer's chat template cannot render it: {error}", "no template") from error
    marked = [(start, end) for start, end in spans[0] if end > start]
    of_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans[0]) != len(of_assistant) or not marked:
        raise RowError(
            f"{field}: the chat template marks {len(spans[0])} parts by {{% generation %}}, the assistant has "
            f"{len(of_assistant)} messages",
            "no template",
        )
    kept = [span for i, span in zip(of_assistant, spans[0], strict=True) if i in said]
    return Rendered(texts[0], tuple((start, end) for start, end in kept))


def _by_prefix(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, field: str, *, said: Sequence[int]
) -> Rendered:
    whole = render(messages, tokenizer, field, prompts=False)
    spans = []
    for i in said:
        before = render(messages[:i], tokenizer, field, prompts=True)
        through = render(messages[: i + 1], tokenizer, field, prompts=False)
        if not (whole.startswith(through) and through.startswith(before)):
            raise RowError(
                f"{field}[{i}]: which tokens are the assistant's cannot be told: the chat template renders "
                f"{_what_differs(whole, through, before)}; give the tokenizer a template with {{% generation %}} marks",
                "not told apart",
            )
        spans.append((len(before), len(before) + len(_without_tail(through[len(before) :], tokenizer))))
    return Rendered(whole, tuple(spans))


def _what_differs(whole: str, through: str, before: str) -> str:
    if not through.startswith(before):
        return f"the message otherwise than it lets a run begin one, {shown(before[-40:])}"
    return "the conversation up to it otherwise once more messages follow"


def _without_tail(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """What a run would generate: nothing after the end token, such as the line break of many templates."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(tuple(tokenizer.get_added_vocab())) else text
