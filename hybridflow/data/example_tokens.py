"""The tokens of an example's texts, and which of them count."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybridflow.data.chat import Rendered
from hybridflow.data.example_texts import Plain
from hybridflow.data.rows import RowError


@dataclass(frozen=True)
class ExampleTokens:
    ids: list[int]
    trained: list[bool]

    @property
    def prompt_length(self) -> int:
        return self.trained.index(True)


Problem = str  # why there are no tokens, for a message that says where


def tokens(texts: Sequence[Plain | Rendered], tokenizer: PreTrainedTokenizerBase) -> list[ExampleTokens | Problem]:
    """Of each; encoded together, which fast tokenizers do on several threads."""
    plain = iter(_of_pairs([text for text in texts if isinstance(text, Plain)], tokenizer))
    chats = iter(_of_chats([text for text in texts if isinstance(text, Rendered)], tokenizer))
    return [next(plain) if isinstance(text, Plain) else next(chats) for text in texts]


# ------------------------------------------------------------------------------------------------ conversations


def _of_chats(chats: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase) -> list[ExampleTokens | Problem]:
    if not chats:
        return []
    if not tokenizer.is_fast:  # the others do not say which characters a token stands for
        return ["the assistant's tokens cannot be told with this tokenizer, which has no tokenizer.json"] * len(chats)
    encoded = tokenizer(
        [chat.text for chat in chats], add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    found = zip(chats, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [_masked(chat, ids, offsets) for chat, ids, offsets in found]


def _masked(chat: Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> ExampleTokens | Problem:
    """A token counts where all characters of the token do."""
    counts = np.zeros(len(chat.text) + 1, np.int64)
    for start, end in chat.spans:
        counts[start + 1 : end + 1] = 1
    before = np.cumsum(counts)  # characters that count before a place
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    counting = before[ends] - before[starts]
    partly = np.flatnonzero((counting > 0) & (counting < ends - starts))
    if len(partly):
        start, end = offsets[int(partly[0])]
        return f"the token {chat.text[start:end]!r} reaches over the boundary of what the assistant says"
    trained = ((counting > 0) & (counting == ends - starts)).tolist()
    return ExampleTokens(ids, trained) if any(trained) else "the tokenizer makes no tokens of what the assistant says"


# ------------------------------------------------------------------------------------------------ prompt and completion


def _of_pairs(pairs: Sequence[Plain], tokenizer: PreTrainedTokenizerBase) -> list[ExampleTokens | Problem]:
    texts = [(pair.prompt, pair.completion) for pair in pairs]
    encoded = iter(_encoded([(p, c) for p, c in texts if isinstance(p, str) and isinstance(c, str)], tokenizer))
    end = tokenizer.eos_token_id
    return [
        _joined(*((p, _without_end(c, end)) if isinstance(p, list) and isinstance(c, list) else next(encoded)), end=end)
        for p, c in texts
    ]


def _joined(prompt: list[int], completion: list[int], *, end: int | None) -> ExampleTokens | Problem:
    for name, ids in (("prompt", prompt), ("completion", completion)):  # a first token is predicted from nothing
        if not ids:
            return f"the tokenizer makes no tokens of the {name}"
    ended = completion if end is None else [*completion, end]
    return ExampleTokens(prompt + ended, [False] * len(prompt) + [True] * len(ended))


def _encoded(pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """Of prompt and completion; neither with an end token."""
    end = tokenizer.eos_token_id
    prompts = [_without_end(ids, end) for ids in _ids([p for p, _ in pairs], tokenizer, special=True)]
    joint = [_without_end(ids, end) for ids in _ids([p + c for p, c in pairs], tokenizer, special=True)]
    split = [ids[: len(prompt)] != prompt for ids, prompt in zip(joint, prompts, strict=True)]
    alone = iter(_ids([c for (_, c), apart in zip(pairs, split, strict=True) if apart], tokenizer, special=False))
    return [
        (prompt, _without_end(next(alone), end) if apart else ids[len(prompt) :])
        for ids, prompt, apart in zip(joint, prompts, split, strict=True)
    ]


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, special: bool) -> list[list[int]]:
    if not texts:
        return []
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
    return encoded


def _without_end(ids: list[int], end: int | None) -> list[int]:
    return ids[:-1] if ids and ids[-1] == end else ids


def no_tokens(where: str, problem: Problem) -> RowError:
    return RowError(f"{where}: {problem}", "no tokens")
