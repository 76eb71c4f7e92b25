"""A large file of prompts: seconds until it can be drawn from, what that takes of memory, seconds of 1,024 prompts.

    python -m tests.bench.rows [--gb 10] [--directory DIR]

The file is written first, in DIR or where temporary files go, and removed at the end.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from hybridflow.data.prompts import load_prompts
from hybridflow.recording.measure import peak_rss_mb
from tests.tiny_models import make_tokenizer

ROWS = 10_000  # that are written at a time
TEXT = "12+34=" * 130


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10.0, help="size of the file, 1e9 bytes")
    parser.add_argument("--directory", type=Path, default=None, help="for the file")
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        file = Path(directory) / "train.jsonl"
        block = "".join(json.dumps({"prompt": TEXT[: 600 + i % 180], "answer": str(i)}) + "\n" for i in range(ROWS))
        with file.open("w") as out:
            for _ in range(max(1, round(options.gb * 1e9 / len(block)))):
                out.write(block)
        before, begin = peak_rss_mb(), time.perf_counter()
        settings = {"prompt_key": "prompt", "chat_template": False, "max_length": 1000, "overlong": "drop"}
        dataset = load_prompts(file, tokenizer, **settings, vocab_size=100)
        loaded, begin = time.perf_counter() - begin, time.perf_counter()
        memory = peak_rss_mb() - before
        dataset.draw(dataset.order(0, True, position=0), 1024)
        drawn = time.perf_counter() - begin
        print(f"{file.stat().st_size / 1e9:.1f} GB, {len(dataset):,} rows: loaded in {loaded:.1f} s")
        print(f"{memory:.0f} MiB more than before were held at most")
        print(f"1,024 prompts drawn and encoded in {drawn:.1f} s")


if __name__ == "__main__":
    main()
