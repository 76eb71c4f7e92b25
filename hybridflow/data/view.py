"""What a run would see of data files, as lines of text: columns, token lengths, and some rows as their tokens."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.architecture.spec import read_spec
from hybridflow.config import ExperimentConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.data.examples import Example
from hybridflow.data.fixed_inputs import load_rows
from hybridflow.data.inputs import train_prompts
from hybridflow.data.prompts import Prompt
from hybridflow.data.rendering import example_rendering, prompt_rendering
from hybridflow.data.row_notes import left_out_lines
from hybridflow.data.rows import Item, shown
from hybridflow.data.same_tokens import tokenizer_notes
from hybridflow.data.sources import Files
from hybridflow.data.tokenizers import decoded, load_tokenizer
from hybridflow.data.understood import example_summary, marked, prompt_summary
from hybridflow.data.usable import Dropped, UsableRows
from hybridflow.rewards.specs import check_columns

NUM_LOOKED_AT = 1000  # rows, for the columns
NUM_MEASURED = 10_000  # rows whose tokens are counted, evenly spread
NUM_SAMPLES = 3
NUM_BINS, BAR = 12, 40


def columns(files: Files) -> Iterator[str]:
    """A line for each column of the first rows: the name, the kinds of values, and one value."""
    yield f"{', '.join(files.names)}: {len(files):,} rows, {files.num_bytes / 1e6:,.2f} MB"
    rows = files.rows_at(range(min(len(files), NUM_LOOKED_AT)))
    wrong = [row.problem for row in rows if row.problem is not None]
    if wrong:
        yield f"{len(wrong)} of the first {len(rows):,} rows cannot be read, first: {wrong[0]}"
    names = list(dict.fromkeys(name for row in rows for name in row.fields))
    width = max(map(len, names), default=0)
    for name in names:
        values = [row.fields[name] for row in rows if name in row.fields]
        kinds = ", ".join(dict.fromkeys(_kind(value) for value in values))
        lacking = len(rows) - len(wrong) - len(values)
        note = f"  ({lacking} of {len(rows) - len(wrong)} rows lack it)" if lacking else ""
        yield f"  {name:{width}}  {kinds}: {shown(values[0])}{note}"


def _kind(value: Any) -> str:
    if isinstance(value, list):
        inner = dict.fromkeys(_kind(item) for item in value[:10])
        return f"list of {' or '.join(inner)}" if inner else "empty list"
    if isinstance(value, dict):
        return f"({', '.join(map(str, value))})"
    return {"str": "text", "NoneType": "null"}.get(type(value).__name__, type(value).__name__)


# ------------------------------------------------------------------------------------------------ with a config


def data_lines(config: AnyConfig) -> Iterator[str]:
    """What a run with this config reads under data.train. Errors: DataError, CheckpointError as the run has them."""
    model = Path(config.trained.model)
    tokenizer, vocab_size = load_tokenizer(model), read_spec(model).vocab_size
    if isinstance(config, ExperimentConfig):
        prompts, ends, by_template = train_prompts(config, tokenizer, vocab_size)
        check_columns(config, prompts.column_names, "data.train")
        files = prompts.rows.files
        yield from prompt_rendering(config.data, files, tokenizer, by_template=by_template).lines(config)
        yield from prompt_summary(config, prompts, ends, tokenizer)
        yield from tokenizer_notes(config, tokenizer)
        yield from _rows(
            prompts.rows,
            "prompts longer than data.max_prompt_length",
            lambda prompt: [len(prompt.token_ids)],
            _prompt_lines,
            tokenizer=tokenizer,
            config=config,
        )
        return
    examples = load_rows(config.data.train, tokenizer, config, vocab_size)
    yield from example_rendering(config.data, config.algorithm.kind, examples.rows.files, tokenizer).lines(config)
    yield from example_summary(config, examples, tokenizer)
    yield from tokenizer_notes(config, tokenizer)
    yield from _rows(
        examples.rows,
        "rows longer than data.max_length",
        lambda example: [len(ids) for ids in example.sequences],
        _example_lines,
        tokenizer=tokenizer,
        config=config,
    )


def _rows(
    rows: UsableRows[Item],
    too_long: str,
    lengths: Callable[[Item], list[int]],
    lines: Callable[[Item, PreTrainedTokenizerBase], Iterator[str]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: AnyConfig,
) -> Iterator[str]:
    yield from left_out_lines("data.train", rows, too_long)
    count = min(len(rows), NUM_MEASURED)
    drawn = rows.draw(_Spread(len(rows), count), count)
    spread = "" if count == len(rows) else f" of {count:,} evenly spread ones"
    yield f"tokens of a sequence{spread}, and how many have so many"
    yield from histogram([length for item in drawn.items for length in lengths(item)])
    yield from _passed_over(drawn.dropped)
    samples = rows.draw(rows.order(config.seed, config.data.shuffle), min(NUM_SAMPLES, len(rows))).items
    for i, item in enumerate(samples, start=1):
        yield f"---- row {i} of the run"
        yield from lines(item, tokenizer)


def _passed_over(dropped: Dropped) -> Iterator[str]:
    for reason, count in dropped.counts.items():
        yield f"passed over {count}: {reason} (first: {dropped.first[reason]})"


@dataclass
class _Spread:
    """An order of `count` rows at equal distances, and then again."""

    num_rows: int
    count: int
    position: int = 0

    def next(self, count: int) -> list[int]:
        places = range(self.position, self.position + count)
        self.position += count
        return [place % self.count * self.num_rows // self.count for place in places]


def histogram(lengths: Sequence[int]) -> Iterator[str]:
    """Bins of equal, round width: a line a bin, with the share as a bar. Last: mean and extremes."""
    width = _round_up(math.ceil((max(lengths) + 1 - min(lengths)) / NUM_BINS))
    first = min(lengths) // width
    counts = torch.bincount(torch.tensor(lengths) // width - first).tolist()
    digits = len(f"{(first + len(counts)) * width - 1}")
    for i, count in enumerate(counts):
        start = (first + i) * width
        bar = "#" * math.ceil(BAR * count / max(counts))
        yield f"  {start:>{digits}}-{start + width - 1:<{digits}}  {count:>{len(str(max(counts)))}}  {bar}".rstrip()
    yield f"  mean {sum(lengths) / len(lengths):,.1f}, shortest {min(lengths):,}, longest {max(lengths):,}"


def _round_up(width: int) -> int:
    """To 1, 2 or 5 times a power of ten."""
    power = int(10 ** (len(str(width)) - 1))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width)


def _prompt_lines(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    yield f"{len(prompt.token_ids)} tokens: {decoded(prompt.token_ids, tokenizer)}"
    for name, value in prompt.columns.items():
        yield f"  {name}: {shown(value, 200)}"


def _example_lines(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    names = ("chosen", "rejected") if len(example.sequences) == 2 else ("sequence",)
    for name, ids, trained in zip(names, example.sequences, example.trained, strict=True):
        text = marked(ids, trained, tokenizer)
        yield f"{name}, {len(ids)} tokens of which {int(trained.sum())} count: {text}"
