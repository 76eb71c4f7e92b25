"""Tokens as a person reads them: special ones visible, those that count between marks."""

import itertools
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

MARKS = ("[[", "]]")  # around tokens that are trained


def decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(list(ids))
    assert isinstance(text, str), f"one sequence was decoded to {type(text).__name__}"
    return text


def marked(ids: Tensor, trained: Tensor, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text, with marks around each run of tokens that count."""
    cuts = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1]), len(ids)]
    texts = []
    for start, end in itertools.pairwise(cuts):
        text = decoded(ids[start:end].tolist(), tokenizer)
        texts.append(f"{MARKS[0]}{text}{MARKS[1]}" if trained[start] else text)
    return "".join(texts)
