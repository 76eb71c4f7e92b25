"""The rows of sums, of the same with answers for SFT, and of products. Strings and `random.Random`."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.examples.sums.products import question

Pair = tuple[int, int]
SOLVED: Sequence[Pair] = ((23, 45), (57, 38))  # in no other row
NUM_HELDOUT, NUM_SFT = 200, 512


def split_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """(training, held out), shuffled: a pair and the same pair the other way round are on one side."""
    source = random.Random(seed)
    solved = {tuple(sorted(pair)) for pair in SOLVED}
    every = [(a, b) for a in range(10, 100) for b in range(a, 100) if (a, b) not in solved]
    source.shuffle(every)
    heldout = [source.choice([(a, b), (b, a)]) for a, b in every[:NUM_HELDOUT]]
    train = [pair for a, b in every[NUM_HELDOUT:] for pair in dict.fromkeys([(a, b), (b, a)])]
    source.shuffle(train)
    return train, heldout


def row_of(pair: Pair) -> dict[str, Any]:
    """A conversation with two solved sums and a third one, and the right answer."""
    solved = [message for a, b in SOLVED for message in (asked(a, b), {"role": "assistant", "content": str(a + b)})]
    return {"prompt": [*solved, asked(*pair)], "answer": str(sum(pair))}


def asked(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{a} + {b} ="}


def sft_row(pair: Pair) -> dict[str, Any]:
    """A question and the answer, without solved sums: all that the assistant says is trained."""
    return {"messages": [asked(*pair), {"role": "assistant", "content": str(sum(pair))}]}


def product_row(pair: Pair) -> dict[str, Any]:
    """For `products.PlainCalculator`."""
    a, b = pair
    return {"question": question(a, b), "answer": str(a * b)}


def write_rows(directory: Path, seed: int) -> dict[str, int]:
    """All files, and how many rows each has."""
    train, heldout = split_pairs(seed)
    files = {
        "train": map(row_of, train),
        "heldout": map(row_of, heldout),
        "sft": map(sft_row, train[:NUM_SFT]),
        "sft_heldout": map(sft_row, heldout),
        "products": map(product_row, train),
        "products_heldout": map(product_row, heldout),
    }
    lines = {name: [f"{json.dumps(row)}\n" for row in rows] for name, rows in files.items()}
    for name, its in lines.items():
        (directory / f"{name}.jsonl").write_text("".join(its), encoding="utf-8")
    return {name: len(its) for name, its in lines.items()}
