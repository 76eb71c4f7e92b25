"""Whether nothing has changed for a run: two checkouts of hybridflow side by side, on one machine. No number is kept.

    git worktree add /tmp/before COMMIT
    python -m tests.bench.same_runs /tmp/before [--only NAME ...] [--whole | --resumed] [--now KEY=VALUE] [--work DIR]

A case is a config of configs/quickstart*.yaml, or a name of MORE. Both checkouts run it for three iterations, or with
--whole to its end. With --resumed the other checkout runs two, and both go on with its checkpoint. Both use this
environment. Each checkout makes its own models and rows in data/ if they are missing.
Every metric, every tensor of a batch and every trained weight must be the same, bit for bit. Costs do not count, and
neither do the engine's log-probs of conversations: when an environment answers decides on their last digits.
Exit status 1: a case differs, or a run has failed. Then DIR keeps the runs, in before/NAME and now/NAME.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import load_config
from hybridflow.config.world_size import smallest_world_size
from tests.distributed.test_determinism import metrics
from tests.launch import of_no_rank

HERE = Path(__file__).resolve().parents[2]
SECONDS, WHOLE_SECONDS, END_SECONDS = 900.0, 5400.0, 60.0  # of a run; from a request to end to the end
NUM_LINES, NUM_NAMED = 30, 3  # of a run that has failed; differences of metrics, of batches and of weights
# of conversations, beside what `metrics` leaves out
TIMED = re.compile(r"environment/wait_seconds|rollout/(\w*log_prob_|gen_kl|token_mult_|kv_cache_)|rollout_log_probs$")
MODELS = {"tiny": (), "tiny_experts": ("--experts", "8"), "tiny_tools": ("--tools",)}  # arguments of tools.make_tiny
CONTEXT = ("actor.tensor_parallel_size=1", "actor.context_parallel_size=2", "actor.micro_batch_tokens=16")
FEW_ROWS = ("data.max_prompt_length=8", "data.prompts_per_iteration=64", "algorithm.update.mini_batch_size=32")
PARTIAL = ("rollout.max_staleness=1", "rollout.partial={oversample: 1.5}")
UNTIMED = ("rollout.partial={oversample: 1.0}", "algorithm.policy.importance=null")  # no row is cut, none is weighed
MORE = {  # case -> quickstart, and what is other
    "partial": ("quickstart_grpo", *PARTIAL),
    "partial_tools": ("quickstart_tools", *PARTIAL, *UNTIMED),
    "context_parallel": ("quickstart", *CONTEXT, *FEW_ROWS),  # two ranks share the tokens of rows longer than 8
}
TEACHER, TAUGHT = "quickstart_sft", "quickstart_distill"  # the second begins with what the first has trained
Contents = dict[str, dict[str, str]]  # metrics, batches, weights -> what each is called -> its value or digest


class RunFailed(RuntimeError):
    """A command has ended with an error, or not in time."""


class Case(NamedTuple):
    name: str
    config: str
    overrides: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(cases(whole=False)), help="these cases alone")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--whole", action="store_true", help="all iterations of each config")
    how.add_argument("--resumed", action="store_true", help="the last iteration alone, from a checkpoint of the other")
    parser.add_argument("--now", nargs="+", metavar="KEY=VALUE", default=[], help="of this checkout's runs alone")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the runs go")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="same_runs_")) if options.work is None else options.work.resolve()
    checkouts = {"before": options.before.resolve(), "now": HERE}
    different = 0
    for name, case in cases(options.whole).items():
        if not options.only or name in options.only or (name == TEACHER and TAUGHT in options.only):
            seconds = WHOLE_SECONDS if options.whole else SECONDS
            line = compared(case, checkouts, work, seconds, *options.now, resumed=options.resumed)
            different += not line.startswith("the same: ")
            print(f"{name}: {line}", flush=True)
    if not different and options.work is None:
        shutil.rmtree(work)
    print(f"{different} cases differ; the runs lie in {work}" if different else "all cases are the same")
    return min(different, 1)


def cases(whole: bool) -> dict[str, Case]:
    """By name, the teacher before the one whom it teaches."""
    named = {path.stem: (path.stem,) for path in (HERE / "configs").glob("quickstart*.yaml")} | MORE
    found = dict[str, Case]()
    for name, (quickstart, *more) in sorted(named.items(), key=lambda item: (item[0] == TAUGHT, item[0])):
        config = f"configs/{quickstart}.yaml"
        if not whole:
            fixed = isinstance(load_config(HERE / config), FixedDataConfig)
            more += ["num_iterations=3", *(["num_epochs=null"] if fixed else [])]
        found[name] = Case(name, config, tuple(more))
    return found


def compared(
    case: Case, checkouts: Mapping[str, Path], work: Path, seconds: float, *own: str, resumed: bool = False
) -> str:
    """What there is to say of a case. own: keys of the second. resumed: both go on with a checkpoint of the first."""
    found: dict[str, Contents] = {}
    saved = work / "saved"
    taken, failures = dict[str, float](), list[str]()
    for name, checkout in checkouts.items():
        try:
            make_models(case, checkout)
            if resumed:
                if name == "before":
                    run(case, checkout, saved, seconds, "num_iterations=2")
                shutil.copytree(saved / case.name, work / name / case.name)
            more = [*([] if resumed else ["checkpoint.load=none"]), *(own if name == "now" else [])]
            taken[name] = run(case, checkout, work / name, seconds, *more)
            found[name] = contents(work / name / case.name)
        except RunFailed as error:
            failures.append(f"{name}: {error}")
    if failures:
        return "\n".join(["differs: a run has failed", *failures])
    if lines := differences(found["before"], found["now"]):
        return "\n    ".join(["differs", *lines])
    rows, batches = ({name.partition(", ")[0] for name in found["now"][kind]} for kind in ("metrics", "batches"))
    counts = f"{len(rows)} rows of metrics, {len(batches)} batches, {len(found['now']['weights'])} weights"
    return f"the same: {counts}; before {taken['before']:.0f} s, now {taken['now']:.0f} s"


def make_models(case: Case, checkout: Path) -> None:
    """Those that the config names, in the checkout, if they are missing. Errors: RunFailed."""
    for name in set(re.findall(r"\bdata/(\w+)/", load_config(HERE / case.config, case.overrides).to_yaml())):
        call(["-m", "tools.make_tiny", f"data/{name}", *MODELS[name], "--if-missing"], checkout, WHOLE_SECONDS)


def run(case: Case, checkout: Path, out: Path, seconds: float, *overrides: str) -> float:
    """Its seconds. Errors: RunFailed."""
    ranks = str(smallest_world_size(load_config(HERE / case.config, case.overrides)))
    teacher = [f"reference.model={out / TEACHER / 'hf'}"] if case.name == TAUGHT else []
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m", "hybridflow.train"]
    own = [f"name={case.name}", f"output_dir={out}", *teacher, *overrides]
    own += ["metrics.dump_batches=true", "metrics.tensorboard=false"]
    begin = time.perf_counter()
    call([*launch, case.config, *case.overrides, *own], checkout, seconds)
    return time.perf_counter() - begin


def call(arguments: list[str], checkout: Path, seconds: float) -> None:
    """One command to its end. Errors: RunFailed, with the last lines that it printed."""
    variables = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "COLUMNS": "160", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    how: dict[str, Any] = {"cwd": checkout, "env": of_no_rank(**variables), "start_new_session": True}
    with tempfile.TemporaryFile() as output:
        started = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, **how)
        try:
            end = f"status {started.wait(seconds)}"
        except subprocess.TimeoutExpired:
            end = f"no end within {seconds:.0f} s"
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun ends its ranks, which have sessions of their own
                if started.poll() is None:
                    os.killpg(started.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        started.wait(END_SECONDS)
        if end != "status 0":
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()[-NUM_LINES:]
            raise RunFailed("\n".join([f"{end}: {' '.join(arguments)}", *lines]))


def contents(directory: Path) -> Contents:
    """Of the directory of a run. Errors: RunFailed where one kind is missing."""
    found: Contents = {"metrics": {}, "batches": {}, "weights": {}}
    for row in metrics(directory):
        found["metrics"] |= {f"iteration {row['iteration']}, {name}": cell for name, cell in row.items()}
    for file in sorted(directory.glob("batches/iteration_*.safetensors")):
        found["batches"] |= {f"{file.stem}, {name}": digest for name, digest in tensors(file).items()}
    for file in sorted([*directory.glob("hf/*.safetensors"), *directory.glob("adapter/*.safetensors")]):
        found["weights"] |= {f"{file.parent.name}: {name}": digest for name, digest in tensors(file).items()}
    if any(", environment/" in name for name in found["metrics"]):
        found = {kind: {key: x for key, x in own.items() if not TIMED.search(key)} for kind, own in found.items()}
    if missing := [kind for kind, values in found.items() if not values]:
        raise RunFailed(f"{directory} has no {' and no '.join(missing)}")
    return found


def tensors(file: Path) -> dict[str, str]:
    """Of a safetensors file: name -> dtype, shape, and the digest of the bytes."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            digest = hashlib.sha256(data[begin + first : begin + last]).hexdigest()
            found[name] = f"{entry['dtype']} {entry['shape']} {digest}"
    return found


def differences(before: Contents, now: Contents) -> list[str]:
    """A line each: the first of each kind, and how many more there are."""
    lines = []
    for kind, old in before.items():
        names = [name for name in old | now[kind] if old.get(name) != now[kind].get(name)]
        for name in names[:NUM_NAMED]:
            lines.append(f"{kind}: {name}: before {old.get(name, 'nothing')}, now {now[kind].get(name, 'nothing')}")
        if names[NUM_NAMED:]:
            lines.append(f"{kind}: and {len(names) - NUM_NAMED} more of {len(old | now[kind])}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
