"""A row's prompt as a text, and its columns."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridflow.data.rows import Row, RowError, shown


@dataclass(frozen=True)
class PromptText:
    where: str
    text: str  # with a chat template, the rendered conversation
    columns: dict[str, Any]


def prompt_text(row: Row, prompt_key: str, tokenizer: PreTrainedTokenizerBase | None) -> PromptText:
    """With a tokenizer the prompt is a conversation for its template. Errors: RowError."""
    if prompt_key not in row.fields:
        raise RowError(
            f"{row.where}: has no key {prompt_key!r} (data.prompt_key); its keys are {', '.join(row.fields) or 'none'}",
            f"no {prompt_key}",
        )
    prompt, field = row.fields[prompt_key], f"{row.where}: {prompt_key}"
    text = _plain_text(prompt, field) if tokenizer is None else _rendered(prompt, field, tokenizer)
    if not text.strip():
        raise RowError(f"{field} = {text!r} is empty", "empty")
    check_encodable(text, field)
    return PromptText(row.where, text, {key: value for key, value in row.fields.items() if key != prompt_key})


def _plain_text(prompt: Any, field: str) -> str:
    if isinstance(prompt, str):
        return prompt
    hint = "; a list of messages needs data.chat_template: true" if isinstance(prompt, list) else ""
    raise RowError(f"{field} = {shown(prompt)} is a {type(prompt).__name__}, expected a text{hint}", "wrong type")


def _rendered(messages: Any, field: str, tokenizer: PreTrainedTokenizerBase) -> str:
    check_messages(messages, field)
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the model's authors and raises what it likes
        raise RowError(f"{field}: the tokenizer's chat template cannot render it: {error}", "no template") from error
    assert isinstance(text, str), f"one conversation was rendered to {type(text).__name__}"
    return text


def check_messages(messages: Any, field: str) -> None:
    """Errors: RowError unless it is a list of messages, one of which has content."""
    if not isinstance(messages, list):
        raise RowError(
            f"{field} = {shown(messages)} is a {type(messages).__name__}; with data.chat_template a prompt "
            f"is a list of messages",
            "wrong type",
        )
    if not messages:
        raise RowError(f"{field} = [] is empty: a conversation needs a message", "empty")
    for number, message in enumerate(messages):
        _check_message(message, f"{field}[{number}]")
    if not any(message["content"].strip() for message in messages):
        raise RowError(f"{field} = {shown(messages)} is empty: no message has content", "empty")


def _check_message(message: Any, field: str) -> None:
    if not isinstance(message, dict):
        raise RowError(f"{field} = {shown(message)} is no message: expected role and content", "wrong type")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise RowError(f"{field}.{key} = {shown(message.get(key))} is not a text", "wrong type")


def check_encodable(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as \ud83d
        raise RowError(f"{field} holds {text[error.start]!r}, which is no character", "no character") from error
