"""The rows: a conversation with two solved sums and a third one, and the right answer. Strings and `random.Random`."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Pair = tuple[int, int]
SOLVED: Sequence[Pair] = ((23, 45), (57, 38))  # in no other row
NUM_HELDOUT = 200


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
    solved = [message for a, b in SOLVED for message in (asked(a, b), {"role": "assistant", "content": str(a + b)})]
    return {"prompt": [*solved, asked(*pair)], "answer": str(sum(pair))}


def asked(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{a} + {b} ="}


def write_rows(file: Path, pairs: Sequence[Pair]) -> None:
    file.write_text("".join(f"{json.dumps(row_of(pair))}\n" for pair in pairs), encoding="utf-8")
