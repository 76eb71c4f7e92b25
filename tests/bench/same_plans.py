"""Whether plans are the same: two checkouts of hybridflow side by side, of every shipped config and shape.

    git worktree add /tmp/before COMMIT
    python -m tests.bench.same_plans /tmp/before [--only TEXT] [--keep DIR]

A case is a config of configs/ or configs/recipes/, or a shape of configs/shapes/ in one of LAYOUTS. Each is planned
with the predicted seconds, as JSON: grids, memory, caches, messages, checkpoints. Of each shape the command also writes
what config.json of an export would say otherwise. Texts must be equal, byte for byte; so must errors. No number is
kept. Each checkout makes its own models of the quickstarts in data/ if they are missing. Other configs whose models are
missing compare their errors alone.
Exit status 1: a case differs. --keep: where the texts of both checkouts stay.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
TP2, TP4, CP2 = (
    f"{{role}}.{key}" for key in ("tensor_parallel_size=2", "tensor_parallel_size=4", "context_parallel_size=2")
)
PP2, SP = "{role}.pipeline_parallel_size=2", "{role}.sequence_parallel=true"
SELECTIVE, FULL, NONE = ("actor.recompute=" + how for how in ("[core_attn,layernorm]", "full", "none"))
LORA = "actor.lora={rank: 16}"
ENGINE = "rollout.tensor_parallel_size=4"
LAYOUTS = {  # name -> ranks, changes of docs/models/layouts.yaml; {role}: of the actor and of the reference
    "alone": (8, (NONE,)),
    "tp 4": (8, (TP4, SP, ENGINE, SELECTIVE)),
    "tp 2 pp 2": (16, (TP2, PP2, FULL, "rollout.pipeline_parallel_size=2")),
    "cp 2": (16, (TP2, SP, CP2, ENGINE)),
    "cp 2 again": (8, (CP2, SELECTIVE, "actor.micro_batch_tokens=2048")),
    "cp 2 on cpus": (8, (CP2, "platform=cpu")),
    "cpus": (8, (TP2, "platform=cpu")),
    "lora": (8, (LORA, TP2, ENGINE)),
    "ep 8": (16, (TP2, SP, "{role}.expert_parallel_size=8", "rollout.enable_expert_parallel=true", ENGINE)),
}
FREE_BYTES = re.compile(r'"free_bytes": \d+,')  # of this machine's disk
OF_THE_HUB = {"sums_qwen2.5_0.5b": "qwen2.5-0.5b", "sums_qwen3_0.6b": "qwen3-0.6b", "sums_gemma3_270m": "gemma-3-270m"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names have it")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the texts stay")
    options = parser.parse_args()
    from tests.bench.same_runs import MODELS, SECONDS, call  # of this checkout: what is below runs in both

    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, checkout in (("before", options.before.resolve()), ("now", HERE)):
            directory = (options.keep or Path(scratch)) / name
            directory.mkdir(parents=True, exist_ok=True)
            for model, arguments in MODELS.items():
                call(["-m", "tools.make_tiny", f"data/{model}", *arguments, "--if-missing"], checkout, SECONDS)
            environment = os.environ | {"PYTHONPATH": str(checkout), "COLUMNS": "120"}
            command = [sys.executable, "-P", str(Path(__file__).resolve()), "--write", str(directory), options.only]
            subprocess.run(command, cwd=checkout, env=environment, check=True)
            found[name] = {file.name: file.read_text(encoding="utf-8") for file in sorted(directory.iterdir())}
    before, now = found["before"], found["now"]
    differing = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    for name in differing:
        print(f"{name}: differs")
    errors = sum(text.startswith("1\n") for text in now.values())
    print(f"{len(now)} plans, {errors} of them errors: {len(differing)} differ")
    return bool(differing)


def write(directory: Path, only: str) -> None:
    """The text of every case of this checkout, in files of the cases' names."""
    from hybridflow.architecture.spec import config_changes, read_spec

    for case, arguments in cases():
        if only in case:
            (directory / case).write_text(planned(arguments), encoding="utf-8")
            print(case, flush=True)
    for shape in sorted(Path("configs/shapes").iterdir()):
        if only in (case := f"export {shape.name}"):
            spec = read_spec(shape)
            changes = [spec.engine_fields, *(config_changes(spec, head) for head in ("lm", "score", None))]
            text = json.dumps(changes, default=str, sort_keys=True)
            (directory / case).write_text(f"0\n{text}\n", encoding="utf-8")


def cases() -> Iterator[tuple[str, list[str]]]:
    for config in [*sorted(Path("configs").glob("*.yaml")), *sorted(Path("configs/recipes").glob("*.yaml"))]:
        model = [f"actor.model=configs/shapes/{OF_THE_HUB[config.stem]}"] if config.stem in OF_THE_HUB else []
        yield config.stem, [str(config), *model]
    for shape in sorted(Path("configs/shapes").iterdir()):
        models = [f"{role}.model={shape}" for role in ("actor", "reference")]
        for name, (ranks, changes) in LAYOUTS.items():
            named = [change.replace("{role}", role) for change in changes for role in ("actor", "reference")]
            yield (
                f"{shape.name}, {name}",
                ["docs/models/layouts.yaml", "--world-size", str(ranks), *models, *dict.fromkeys(named)],
            )


def planned(arguments: list[str]) -> str:
    """The exit status, and all that the command prints."""
    from hybridflow.cli.plan import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main([*arguments, "--json", "--time"])
    return f"{status}\n{FREE_BYTES.sub('', printed.getvalue())}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
