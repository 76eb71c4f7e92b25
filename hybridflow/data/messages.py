"""What a conversation has to be: a list of messages with role and content."""

from typing import Any

from hybridflow.data.rows import RowError, shown


def is_conversation(value: Any) -> bool:
    """By its kind alone: a list, not of token ids."""
    return isinstance(value, list) and not is_token_ids(value)


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)


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


def check_token_ids(ids: list[int], field: str, vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RowError(
                f"{field} has the token id {token_id}, the model knows those from 0 to vocab_size - 1 = "
                f"{vocab_size - 1}",
                "unknown token",
            )
