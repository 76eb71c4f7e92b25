"""Prompts: JSON lines in, packed PromptBatch out, in an order that can be resumed.

    dataset = load_prompts("data/train.jsonl", tokenizer, prompt_key="prompt", chat_template=False,
                           max_length=512, overlong="drop", vocab_size=32000)
    order = PromptOrder(len(dataset), seed=0, shuffle=True)
    batch = dataset.batch(order.next(64))

A line is an object. Its `prompt_key` holds the prompt: a text, or with `chat_template` a list of messages
such as {"role": "user", "content": "..."}. Every other key is a column that travels to the reward functions,
so all lines have the same ones. Of a file only the token ids stay in memory, four bytes each.
"""

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import PromptBatch
from hybridflow.data.rows import PromptFile, Row, shown
from hybridflow.errors import DataError

CHUNK_ROWS = 2048  # are encoded together, or fewer where they are long: a chunk takes some 100 bytes a token meanwhile
CHUNK_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class PromptDataset:
    """Tokenised prompts, and the file that has their texts and columns. With a chat template, a text is rendered."""

    token_ids: Tensor  # (T,) int32, prompt after prompt
    offsets: Tensor  # (N + 1,) int64: prompt i is token_ids[offsets[i]:offsets[i + 1]]
    spans: Tensor  # (N, 2) int64: where the line of each prompt starts in the file, and its bytes
    column_names: tuple[str, ...]
    file: PromptFile
    num_dropped: int  # prompts of the file that were too long

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def nbytes(self) -> int:
        """Of all that grows with the number of prompts."""
        return self.token_ids.nbytes + self.offsets.nbytes + self.spans.nbytes

    def batch(self, indices: list[int]) -> PromptBatch:
        """The prompts at `indices`, in this order; one may appear twice.

        Errors: DataError if the file is no longer what it was when it was loaded.
        """
        starts, ends = self.offsets[indices].tolist(), self.offsets[[i + 1 for i in indices]].tolist()
        chosen = [self.token_ids[start:end] for start, end in zip(starts, ends, strict=True)]
        rows = self.file.rows_at(self.spans[indices].tolist())
        return PromptBatch(
            input_ids=torch.cat([self.token_ids[:0], *chosen]).to(torch.int64),
            lengths=torch.tensor([len(ids) for ids in chosen], dtype=torch.int64),
            texts=tuple(row.text for row in rows),
            columns={name: tuple(row.columns[name] for row in rows) for name in self.column_names},
        )


class PromptOrder:
    """Which prompts come next: one permutation an epoch, each a function of (seed, epoch) alone.

    The only state is `position`, the number of prompts handed out so far. The order from there on does not depend on
    how many were asked for at a time, so a run that is resumed with the position it had goes on exactly as it would.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, *, position: int = 0) -> None:
        assert num_prompts > 0, f"num_prompts = {num_prompts}: an order needs a prompt"
        assert position >= 0, f"position = {position} is negative"
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self.position = position

    def next(self, count: int) -> list[int]:
        """The next `count` indices; a call may cross into the next epoch, or over several."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, start = divmod(self.position, self._num_prompts)
            taken = self._permutation(epoch)[start : start + count - len(indices)].tolist()
            indices += taken
            self.position += len(taken)
        return indices

    def _permutation(self, epoch: int) -> Tensor:
        """(num_prompts,) drawn anew by each call: a million take some 20 milliseconds."""
        if not self._shuffle:
            return torch.arange(self._num_prompts)
        digest = hashlib.blake2b(f"prompt order {self._seed} {epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # below 2**63
        return torch.randperm(self._num_prompts, generator=generator)


def load_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str,
    chat_template: bool,
    max_length: int,
    overlong: Literal["drop", "error"],
    vocab_size: int,
) -> PromptDataset:
    """Read and encode a JSON-lines file. Blank lines are skipped.

    Args:
        prompt_key: the key of a line that holds its prompt.
        chat_template: the prompt is a list of messages, rendered by the tokenizer's chat template.
        max_length: tokens a prompt may have, special tokens included.
        overlong: what happens to a longer one: it is left out and counted, or it is an error.
        vocab_size: the token ids that the model knows are those below it.

    Raises:
        DataError: the file, a line or a prompt cannot be used; names the file, the line and the rule.
    """
    file = PromptFile(Path(path), prompt_key=prompt_key, template=tokenizer if chat_template else None)
    kept, num_dropped, shortest = _Kept(), 0, 0
    for row, ids in _encoded_rows(file, tokenizer, chat_template=chat_template):
        _check_length(row, ids, max_length if overlong == "error" else None)
        if len(ids) > max_length:
            num_dropped += 1
            shortest = min(shortest or len(ids), len(ids))
            continue
        _check_vocabulary(row, ids, vocab_size, tokenizer)
        kept.add(row, ids)
    if not kept.spans and not num_dropped:
        raise DataError(f"{path}: holds no prompt; expected one JSON object a line with {prompt_key!r}")
    if not kept.spans:
        raise DataError(
            f"{path}: no prompt is left: all {num_dropped} are longer than data.max_prompt_length = "
            f"{max_length} tokens; the shortest has {shortest}"
        )
    return kept.dataset(file, num_dropped)


class _Kept:
    """What a dataset holds, as it grows: arrays that are enlarged where they lie, so that nothing is there twice."""

    def __init__(self) -> None:
        self.token_ids, self.offsets, self.spans = array("i"), array("q", [0]), array("q")
        self.column_names: tuple[str, ...] = ()

    def add(self, row: Row, ids: list[int]) -> None:
        self.column_names = self.column_names or tuple(row.columns)
        self.token_ids.fromlist(ids)
        self.offsets.append(len(self.token_ids))
        self.spans.extend((row.start, row.size))

    def dataset(self, file: PromptFile, num_dropped: int) -> PromptDataset:
        """Over the arrays' own memory."""
        return PromptDataset(
            token_ids=torch.frombuffer(self.token_ids, dtype=torch.int32),
            offsets=torch.frombuffer(self.offsets, dtype=torch.int64),
            spans=torch.frombuffer(self.spans, dtype=torch.int64).view(-1, 2),
            column_names=self.column_names,
            file=file,
            num_dropped=num_dropped,
        )


def _encoded_rows(
    file: PromptFile, tokenizer: PreTrainedTokenizerBase, *, chat_template: bool
) -> Iterator[tuple[Row, list[int]]]:
    """Every row with its token ids; all have the columns of the first."""
    first: Row | None = None
    for rows in _chunks(file.rows()):
        first = first or rows[0]
        _check_same_columns(first, rows)
        yield from zip(rows, _encode([row.text for row in rows], tokenizer, chat_template=chat_template), strict=True)


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows that are encoded together."""
    chunk: list[Row] = []
    room = CHUNK_CHARACTERS
    for row in rows:
        chunk.append(row)
        room -= len(row.text)
        if room <= 0 or len(chunk) == CHUNK_ROWS:
            yield chunk
            chunk, room = [], CHUNK_CHARACTERS
    if chunk:
        yield chunk


def _check_same_columns(first: Row, rows: list[Row]) -> None:
    for row in rows:
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
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=not chat_template, verbose=False)["input_ids"]
    if chat_template:
        return encoded
    return [ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids for ids in encoded]


def _check_length(row: Row, ids: list[int], limit: int | None) -> None:
    """Raise for a prompt of no tokens, and for one of more than `limit` where there is a limit."""
    if not ids:
        raise DataError(f"{row.where}: the tokenizer makes no tokens of the prompt {shown(row.text)}")
    if limit is not None and len(ids) > limit:
        raise DataError(
            f"{row.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length = {limit}; "
            f"data.overlong_prompts: drop leaves such prompts out"
        )


def _check_vocabulary(row: Row, ids: list[int], vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise for a token that the model has no embedding for: its tokenizer has more tokens than its config says."""
    largest = max(ids)
    if largest >= vocab_size:
        raise DataError(
            f"{row.where}: the prompt has the token id {largest} ({shown(tokenizer.convert_ids_to_tokens(largest))}), "
            f"the actor's model knows those below its vocab_size = {vocab_size}"
        )
