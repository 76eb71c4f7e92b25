"""Prompts: JSON lines in, packed PromptBatch out, in an order that can be resumed.

    dataset = load_prompts("data/train.jsonl", tokenizer, prompt_key="prompt", chat_template=False,
                           max_length=512, overlong="drop")
    order = PromptOrder(len(dataset), seed=0, shuffle=True)
    batch = dataset.batch(order.next(64))

A line is an object. Its `prompt_key` holds the prompt: a text, or with `chat_template` a list of messages
such as {"role": "user", "content": "..."}. Every other key is a column that travels to the reward functions,
so all lines have the same ones.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import PromptBatch
from hybridflow.errors import DataError


@dataclass(frozen=True)
class PromptDataset:
    """Tokenised prompts. `texts` are what was encoded: with a chat template, the rendered conversation."""

    input_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    columns: dict[str, tuple[Any, ...]]  # one entry a prompt
    num_dropped: int  # prompts of the file that were too long

    def __len__(self) -> int:
        return len(self.input_ids)

    def batch(self, indices: list[int]) -> PromptBatch:
        """The prompts at `indices`, in this order; one may appear twice."""
        chosen = [self.input_ids[i] for i in indices]
        return PromptBatch(
            input_ids=torch.tensor([token for ids in chosen for token in ids], dtype=torch.int64),
            lengths=torch.tensor([len(ids) for ids in chosen], dtype=torch.int64),
            texts=tuple(self.texts[i] for i in indices),
            columns={key: tuple(column[i] for i in indices) for key, column in self.columns.items()},
        )


@dataclass(frozen=True)
class _Row:
    where: str  # file and line, for messages
    text: str
    columns: dict[str, Any]


class PromptOrder:
    """Which prompts come next: one permutation an epoch, each a function of (seed, epoch) alone.

    The order from `position` on does not depend on how many prompts were asked for at a time, so a run that
    is resumed with the position it had goes on exactly as it would have.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, *, position: int = 0) -> None:
        assert num_prompts > 0, f"num_prompts = {num_prompts}: an order needs a prompt"
        assert position >= 0, f"position = {position} is negative"
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._position = position
        self._drawn: tuple[int, list[int]] = (-1, [])  # an epoch and its permutation

    @property
    def position(self) -> int:
        """Prompts handed out so far."""
        return self._position

    @property
    def epoch(self) -> float:
        """Passes over the prompts so far: 1.5 is the middle of the second."""
        return self._position / self._num_prompts

    def next(self, count: int) -> list[int]:
        """The next `count` indices; a call may cross into the next epoch, or over several."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, start = divmod(self._position, self._num_prompts)
            taken = self._permutation(epoch)[start : start + count - len(indices)]
            indices += taken
            self._position += len(taken)
        return indices

    def _permutation(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_prompts))
        if self._drawn[0] != epoch:
            digest = hashlib.blake2b(f"prompt order {self._seed} {epoch}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # below 2**63
            self._drawn = (epoch, torch.randperm(self._num_prompts, generator=generator).tolist())
        return self._drawn[1]


def load_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str,
    chat_template: bool,
    max_length: int,
    overlong: Literal["drop", "error"],
) -> PromptDataset:
    """Read and encode a JSON-lines file. Blank lines are skipped.

    Args:
        prompt_key: the key of a line that holds its prompt.
        chat_template: the prompt is a list of messages, rendered by the tokenizer's chat template.
        max_length: tokens a prompt may have, special tokens included.
        overlong: what happens to a longer one: it is left out and counted, or it is an error.

    Raises:
        DataError: the file, a line or a prompt cannot be used; names the file, the line and the rule.
    """
    rows = [
        _parse_row(line, where, prompt_key, tokenizer=tokenizer if chat_template else None)
        for where, line in _lines(Path(path))
    ]
    if not rows:
        raise DataError(f"{path}: holds no prompt; expected one JSON object a line with {prompt_key!r}")
    _check_same_columns(rows)
    encoded = _encode([row.text for row in rows], tokenizer, chat_template=chat_template)
    _check_lengths(rows, encoded, max_length if overlong == "error" else None)
    kept = [i for i, ids in enumerate(encoded) if len(ids) <= max_length]
    if not kept:
        raise DataError(
            f"{path}: no prompt is left: all {len(rows)} are longer than data.max_prompt_length = "
            f"{max_length} tokens; the shortest has {min(map(len, encoded))}"
        )
    return PromptDataset(
        input_ids=tuple(tuple(encoded[i]) for i in kept),
        texts=tuple(rows[i].text for i in kept),
        columns={key: tuple(rows[i].columns[key] for i in kept) for key in rows[0].columns},
        num_dropped=len(rows) - len(kept),
    )


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file and line number, text) of each line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason}); prompt files are JSON lines") from error


def _parse_row(line: str, where: str, prompt_key: str, *, tokenizer: PreTrainedTokenizerBase | None) -> _Row:
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
    return _Row(where, text, row)


def _plain_text(prompt: Any, field: str) -> str:
    if isinstance(prompt, str):
        return prompt
    hint = "; a list of messages needs data.chat_template: true" if isinstance(prompt, list) else ""
    raise DataError(f"{field} = {_shown(prompt)} is a {type(prompt).__name__}, expected a text{hint}")


def _rendered(messages: Any, field: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if not isinstance(messages, list):
        raise DataError(
            f"{field} = {_shown(messages)} is a {type(messages).__name__}; with data.chat_template a prompt "
            f"is a list of messages"
        )
    if not messages:
        raise DataError(f"{field} = [] is empty: a conversation needs a message")
    for number, message in enumerate(messages):
        _check_message(message, f"{field}[{number}]")
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{field} = {_shown(messages)} is empty: no message has content")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the model's authors and raises what it likes
        raise DataError(f"{field}: the tokenizer's chat template cannot render it: {error}") from error


def _check_message(message: Any, field: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f"{field} = {_shown(message)} is no message: expected role and content")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise DataError(f"{field}.{key} = {_shown(message.get(key))} is not a text")


def _check_encodable(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as \ud83d
        raise DataError(f"{field} holds {text[error.start]!r}, which is no character") from error


def _check_same_columns(rows: list[_Row]) -> None:
    first = rows[0]
    for row in rows[1:]:
        for having, lacking in ((first, row), (row, first)):
            missing = [key for key in having.columns if key not in lacking.columns]
            if missing:
                raise DataError(
                    f"{lacking.where}: has no key {missing[0]!r}, which {having.where} has; every line "
                    f"needs the same columns"
                )


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, chat_template: bool) -> list[list[int]]:
    """Token ids of each text. A rendered conversation has its special tokens already; a plain prompt gets
    them, but no end token, after which there would be nothing to say."""
    encoded = tokenizer(texts, add_special_tokens=not chat_template, verbose=False)["input_ids"]
    if chat_template:
        return encoded
    return [ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids for ids in encoded]


def _check_lengths(rows: list[_Row], encoded: list[list[int]], limit: int | None) -> None:
    """Raise for a prompt of no tokens, and for one of more than `limit` where there is a limit."""
    for row, ids in zip(rows, encoded, strict=True):
        if not ids:
            raise DataError(f"{row.where}: the tokenizer makes no tokens of the prompt {_shown(row.text)}")
        if limit is not None and len(ids) > limit:
            raise DataError(
                f"{row.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length = {limit}; "
                f"data.overlong_prompts: drop leaves such prompts out"
            )


def _shown(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
