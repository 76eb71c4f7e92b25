"""GSM8K as it is published, Parquet or JSON lines, into prompts with answers: OUT/train.jsonl and OUT/test.jsonl.

    python -m tools.data.gsm8k DIRECTORY data/gsm8k

DIRECTORY holds the files of openai/gsm8k, configuration `main` (train-*.parquet, test-*.parquet), or those of
github.com/openai/grade-school-math (train.jsonl, test.jsonl). Both have the columns `question` and `answer`, a solution
that ends in `#### ` and the number. A prompt is a message of the user, with what verl adds to ask for that form; the
number alone is the column `answer`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridflow.config.data import SourceConfig
from hybridflow.data.rows import Row
from hybridflow.data.sources import open_files
from hybridflow.errors import DataError, UserError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # verl's, by which its scores are
SPLITS = ("train", "test")
CHUNK = 1000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.data.gsm8k", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="with the published files")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write")
    options = parser.parse_args(arguments)
    try:
        for split in SPLITS:
            count = write(published(options.directory, split), options.out / f"{split}.jsonl")
            print(f"{options.out / split}.jsonl: {count:,} rows")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def published(directory: Path, split: str) -> Sequence[Path]:
    """The files of a split. Errors: DataError."""
    found = sorted([*directory.glob(f"{split}*.parquet"), *directory.glob(f"{split}.jsonl")])
    if not found:
        raise DataError(f"{directory}: has neither {split}*.parquet nor {split}.jsonl")
    return found


def write(files: Sequence[Path], out: Path) -> int:
    """How many rows there were. Errors: DataError naming file and row."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = open_files(tuple(SourceConfig(path=str(file)) for file in files), str(out))
    with out.open("w", encoding="utf-8") as file:
        for start in range(0, len(rows), CHUNK):
            for row in converted(rows.rows_at(range(start, min(start + CHUNK, len(rows))))):
                file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
    return len(rows)


def converted(rows: Sequence[Row]) -> Iterator[dict[str, object]]:
    for row in rows:
        if row.problem is not None:
            raise row.problem
        question, solution = (_text(row, name) for name in ("question", "answer"))
        _, mark, answer = solution.rpartition("####")
        if not mark or not answer.strip():
            raise DataError(f"{row.where}: answer has no number after ####")
        content = f"{question.strip()} {INSTRUCTION}"
        yield {"prompt": [{"role": "user", "content": content}], "answer": answer.strip().replace(",", "")}


def _text(row: Row, name: str) -> str:
    if not isinstance(row.fields.get(name), str):
        there = ", ".join(row.fields) or "none"
        raise DataError(f"{row.where}: has no text {name!r}; its columns are {there}")
    return str(row.fields[name])


if __name__ == "__main__":
    sys.exit(main())
