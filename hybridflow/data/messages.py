"""What a conversation has to be, and the one form in which templates get it.

    {"role": "user", "content": "text", ...}        role and content as texts; other keys reach the template as they are

Content may be a list of text parts, and null beside tool_calls. `weight` of an assistant's message, 0 or 1, says
whether it is trained on, as OpenAI has it. ShareGPT's `from` and `value` are read where `data.message_format` says so.
"""

from collections.abc import Mapping
from typing import Any, Literal

from hybridflow.data.rows import RowError, shown

Message = dict[str, Any]
Format = Literal["openai", "sharegpt"]
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool", "tool": "tool"}


def is_conversation(value: Any) -> bool:
    """By the kind of the value alone: a list, not of token ids."""
    return isinstance(value, list) and not is_token_ids(value)


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)


def read_messages(given: Any, field: str, form: Format = "openai") -> list[Message]:
    """Errors: RowError unless it is a list of messages, one of which has content."""
    if not isinstance(given, list):
        raise RowError(
            f"{field} = {shown(given)} is a {type(given).__name__}; what data.chat_template renders "
            f"is a list of messages, or a text",
            "wrong type",
        )
    if not given:
        raise RowError(f"{field} = [] is empty: a conversation needs a message", "empty")
    messages = [_message(one, f"{field}[{number}]", form) for number, one in enumerate(given)]
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise RowError(f"{field} = {shown(given)} is empty: no message has content", "empty")
    return messages


def _message(given: Any, field: str, form: Format) -> Message:
    if not isinstance(given, dict):
        raise RowError(f"{field} = {shown(given)} is no message: expected role and content", "wrong type")
    message = {key: value for key, value in given.items() if value is not None}
    if form == "sharegpt":
        message = _from_sharegpt(message, field)
    elif "role" not in message and "from" in message:
        raise RowError(
            f"{field} has from and value in place of role and content: data.message_format: sharegpt reads them",
            "wrong type",
        )
    if not isinstance(message.get("role"), str):
        raise RowError(f"{field}.role = {shown(message.get('role'))} is not a text", "wrong type")
    return message | {"content": _content(message, field)}


def _from_sharegpt(message: Mapping[str, Any], field: str) -> Message:
    role = message.get("from")
    if role not in SHAREGPT_ROLES:
        raise RowError(
            f"{field}.from = {shown(role)}: data.message_format sharegpt knows {', '.join(SHAREGPT_ROLES)}",
            "wrong type",
        )
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**rest, "role": SHAREGPT_ROLES[str(role)], "content": message.get("value")}


def _content(message: Mapping[str, Any], field: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        raise RowError(f"{field}.content = {shown(content)} is not a text", "wrong type")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise RowError(
                f"{field}.content[{i}] = {shown(part)} is no text part, such as {{'type': 'text', 'text': '...'}}; "
                f"models here read text alone",
                "wrong type",
            )
        texts.append(text)
    return "".join(texts)


def is_trained_on(message: Message, field: str) -> bool:
    """Whether a message is trained on: `weight` says so, and a message without `weight` is."""
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise RowError(f"{field}.weight = {shown(weight)}, expected 0 or 1", "wrong type")
    return bool(weight)


def check_encodable(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as \ud83d
        raise RowError(f"{field} holds {text[error.start]!r}, which is no character", "no character") from error


def check_token_ids(ids: list[int], field: str, vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RowError(
                f"{field} has the token id {token_id}, the model knows those from 0 to vocab_size - 1 = "
                f"{vocab_size - 1}",
                "unknown token",
            )
