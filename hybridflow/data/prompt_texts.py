"""A row's prompt, as a text or as token ids, and its columns."""

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
    """With a template the prompt is a conversation for it. Errors: RowError."""
    if prompt_key not in row.fields:
        raise RowError(
            f"{row.where}: has no key {prompt_key!r} (data.prompt_key); its keys are {', '.join(row.fields) or 'none'}",
            f"no {prompt_key}",
        )
    prompt, field = row.fields[prompt_key], f"{row.where}: {prompt_key}"
    columns = {key: value for key, value in row.fields.items() if key != prompt_key}
    if is_token_ids(prompt):
        return PromptText(row.where, "", prompt, columns)
    messages = None if template is None else read_messages(prompt, field, template.options.form)
    if template is None or messages is None:
        text = _plain_text(prompt, field)
    else:
        text = template.prompt(messages, row.fields, field)
    if not text.strip():
        raise RowError(f"{field} = {text!r} is empty", "empty")
    check_encodable(text, field)
    return PromptText(row.where, text, None, columns, messages)


def _plain_text(prompt: Any, field: str) -> str:
    if isinstance(prompt, str):
        return prompt
    hint = "; a list of messages needs data.chat_template: true" if isinstance(prompt, list) else ""
    raise RowError(f"{field} = {shown(prompt)} is a {type(prompt).__name__}, expected a text{hint}", "wrong type")
