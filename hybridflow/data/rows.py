"""The rows of a JSON-lines file: read once in full, and some of them again whenever they are asked for.

    file = PromptFile(Path("train.jsonl"), prompt_key="prompt", template=None)
    for row in file.rows():            # every row, checked
        row.text, row.columns, row.start, row.size
    file.rows_at([(0, 120), (4096, 80)])  # those at (start, size)

So nobody holds texts and columns of a whole file. In return the file has to stay as it was at the first reading.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PreTrainedTokenizerBase

from hybridflow.errors import DataError


@dataclass(frozen=True)
class Row:
    where: str  # file and line, for messages
    start: int  # bytes before its line
    size: int  # bytes of its line
    text: str  # what is encoded: with a chat template, the rendered conversation
    columns: dict[str, Any]


class PromptFile:
    """A file of prompts. `template`: the tokenizer whose chat template renders them, None where they are texts."""

    def __init__(self, path: Path, *, prompt_key: str, template: PreTrainedTokenizerBase | None) -> None:
        self.path = path
        self._prompt_key, self._template = prompt_key, template
        self._hash = hashlib.blake2b(digest_size=16)
        self._stamp: tuple[int, int] | None = None

    @property
    def digest(self) -> bytes:
        """Of all bytes, once `rows` has come to its end."""
        return self._hash.digest()

    def rows(self) -> Iterator[Row]:
        """Every line that is not blank; once. Errors: DataError naming the file, the line and the rule."""
        assert self._stamp is None, f"{self.path} is read in full once"
        with self._opened() as file:
            self._stamp = _stamp(file)
            for number, (start, line) in enumerate(self._lines(file), start=1):
                text = self._decoded(start, line)
                if text.strip():
                    yield self._parsed(text, f"{self.path}, line {number}", start, len(line))
            self._check_unchanged(file)

    def rows_at(self, spans: Iterable[tuple[int, int]]) -> list[Row]:
        """The rows whose lines lie at these (start, size). Errors: DataError if the file is not what it was."""
        with self._opened() as file:
            lines = [(start, _read_at(file, start, size)) for start, size in spans]
            self._check_unchanged(file)
        return [
            self._parsed(self._decoded(start, line), f"{self.path}, the line at byte {start}", start, len(line))
            for start, line in lines
        ]

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with self.path.open("rb") as file:
                if not file.seekable():
                    raise DataError(f"{self.path}: is no regular file; rows are read again when a batch asks for them")
                yield file
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """(bytes before it, itself with its end) of each line."""
        start = 0
        for block in file:  # ends with \n
            self._hash.update(block)
            for line in block.splitlines(keepends=True):  # a \r alone ends a line as well
                yield start, line
                start += len(line)

    def _decoded(self, start: int, line: bytes) -> str:
        try:
            return line.decode("utf-8" if start else "utf-8-sig")
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 text ({error.reason}); prompt files are JSON lines"
            raise DataError(f"{self.path}: {problem}") from error

    def _parsed(self, line: str, where: str, start: int, size: int) -> Row:
        text, columns = _parse(line, where, self._prompt_key, tokenizer=self._template)
        return Row(where, start, size, text, columns)

    def _check_unchanged(self, file: BinaryIO) -> None:
        if _stamp(file) != self._stamp:
            raise DataError(
                f"{self.path}: has changed since the run began to read it; rows are read again when a batch asks for "
                f"them, so the file must stay as it is"
            )


def _stamp(file: BinaryIO) -> tuple[int, int]:
    """What tells whether a file is the one it was: its size and when it was last written."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _read_at(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def _parse(
    line: str, where: str, prompt_key: str, *, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[str, dict[str, Any]]:
    """A line's prompt and columns; with a tokenizer the prompt is a conversation for its template."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: is a JSON {type(row).__name__}, expected an object with {prompt_key!r}")
    if prompt_key not in row:
        raise DataError(
            f"{where}: has no key {prompt_key!r} (data.prompt_key); its keys are {', '.join(row) or 'none'}"
        )
    prompt = row.pop(prompt_key)
    field = f"{where}: {prompt_key}"
    text = _plain_text(prompt, field) if tokenizer is None else _rendered(prompt, field, tokenizer)
    if not text.strip():
        raise DataError(f"{field} = {text!r} is empty")
    _check_encodable(text, field)
    return text, row


def _plain_text(prompt: Any, field: str) -> str:
    if isinstance(prompt, str):
        return prompt
    hint = "; a list of messages needs data.chat_template: true" if isinstance(prompt, list) else ""
    raise DataError(f"{field} = {shown(prompt)} is a {type(prompt).__name__}, expected a text{hint}")


def _rendered(messages: Any, field: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if not isinstance(messages, list):
        raise DataError(
            f"{field} = {shown(messages)} is a {type(messages).__name__}; with data.chat_template a prompt "
            f"is a list of messages"
        )
    if not messages:
        raise DataError(f"{field} = [] is empty: a conversation needs a message")
    for number, message in enumerate(messages):
        _check_message(message, f"{field}[{number}]")
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{field} = {shown(messages)} is empty: no message has content")
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the model's authors and raises what it likes
        raise DataError(f"{field}: the tokenizer's chat template cannot render it: {error}") from error
    assert isinstance(text, str), f"one conversation was rendered to {type(text).__name__}"
    return text


def _check_message(message: Any, field: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f"{field} = {shown(message)} is no message: expected role and content")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise DataError(f"{field}.{key} = {shown(message.get(key))} is not a text")


def _check_encodable(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as \ud83d
        raise DataError(f"{field} holds {text[error.start]!r}, which is no character") from error


def shown(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
