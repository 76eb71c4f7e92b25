"""A row's prompt, as a text or as token ids, and the row's columns."""

import json
from dataclasses import dataclass
from typing import Any

from hybridflow.data.messages import Message, check_encodable, is_token_ids, read_messages
from hybridflow.data.rows import Row, RowError, shown
from hybridflow.data.templates import ChatTemplate


@dataclass(frozen=True)
class PromptText:
    where: str
    text: str  # with a chat template, the rendered conversation; empty where the row has token ids
    token_ids: list[int] | None  # where the row has them
    columns: dict[str, Any]
    messages: list[Message] | None = None  # of a conversation


def prompt_text(row: Row, prompt_key: str, template: ChatTemplate | None) -> PromptText:
    """With a template the prompt is a conversation for it, or the text of the user's message. Errors: RowError."""
    if prompt_key not in row.fields:
        raise RowError(
            f"{row.where}: has no key {prompt_key!r} (data.prompt_key); its keys are {', '.join(row.fields) or 'none'}",
            f"no {prompt_key}",
        )
    prompt, field = row.fields[prompt_key], f"{row.where}: {prompt_key}"
    columns = {key: value for key, value in row.fields.items() if key != prompt_key}
    if is_token_ids(prompt):
        return PromptText(row.where, "", prompt, columns)
    if template is None:
        messages = None
    elif isinstance(prompt, str):
        if not template.options.texts:
            raise RowError(
                f"{field} = {shown(prompt)} is a text, but the first row has messages: data.chat_template: true "
                "renders texts too, each as the user's message",
                "wrong type",
            )
        messages = [as_user(prompt, field, template)]
    else:
        messages = read_messages(prompt, field, template.options.form)
    if template is None or messages is None:
        text = _plain_text(prompt, field)
    else:
        text = template.prompt(messages, row.fields, field)
    if not text.strip():
        raise RowError(f"{field} = {text!r} is empty", "empty")
    check_encodable(text, field)
    return PromptText(row.where, text, None, columns, messages)


def as_user(text: str, field: str, template: ChatTemplate) -> Message:
    """The user's message with this text. Errors: RowError for a text that is rendered, or written as JSON, already."""
    if not text.strip():
        raise RowError(f"{field} = {text!r} is empty", "empty")
    special = next((token for token in template.tokenizer.all_special_tokens if token and token in text), None)
    if special is not None:
        raise RowError(
            f"{field} = {shown(text)} holds {special!r}, as a text has that a chat template has rendered already: such "
            "texts take data.chat_template=false",
            "rendered already",
        )
    if text.lstrip().startswith("[") and _is_json_list(text):
        raise RowError(
            f"{field} = {shown(text)} is a text, the JSON of a list: write the list itself in the file", "wrong type"
        )
    return {"role": "user", "content": text}


def _is_json_list(text: str) -> bool:
    """Of messages: a text in brackets may be anybody's question."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, list) and any(isinstance(one, dict) for one in found)


def _plain_text(prompt: Any, field: str) -> str:
    if isinstance(prompt, str):
        return prompt
    hint = "; a list of messages needs data.chat_template: true" if isinstance(prompt, list) else ""
    raise RowError(f"{field} = {shown(prompt)} is a {type(prompt).__name__}, expected a text{hint}", "wrong type")
