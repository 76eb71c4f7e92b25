"""An iteration of two checkouts of hybridflow by turns, on one machine: medians of its seconds, and their ratio.

    git worktree add /tmp/before COMMIT
    python -m tests.bench.two_checkouts /tmp/before [--rounds 5] [--ranks 2] [-- --size small --dtype float32]
    python -m tests.bench.two_checkouts /tmp/before --experts [--rounds 5] [-- --iterations 6]

What follows `--` goes to tests.bench.iteration, or with --experts to tests.bench.experts: an iteration of a mixture by
each cut of the experts. Both checkouts use this environment.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
TITLE = re.compile(r"(\w+) \([\d.]+ M parameters\), (\w+)")
EXPERTS_ROW = re.compile(r"^(\w+): iteration ([\d.]+) s", re.MULTILINE)
ROW = re.compile(r"│ iteration +│ +([\d.]+) │")
Seconds = dict[str, float]  # of an iteration, by size and type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", action="store_true", help="of a mixture of experts, on two ranks")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]  # argparse loses what follows
    options, rest = parser.parse_args(own), sys.argv[len(own) + 2 :]
    checkouts, found = {"before": options.before.resolve(), "now": HERE}, {"before": [], "now": []}
    for number in range(options.rounds):
        names = list(checkouts) if number % 2 == 0 else list(checkouts)[::-1]
        for name in names:
            measure = measured_experts if options.experts else partial(measured, ranks=options.ranks)
            found[name].append(measure(checkouts[name], rest=rest))
            print(f"round {number + 1} of {options.rounds}, {name}: {shown(found[name][-1])}", flush=True)
    medians = {name: median_of(rows) for name, rows in found.items()}
    for case, seconds in medians["before"].items():
        now = medians["now"][case]
        print(f"{case}: median before {seconds:.3f} s, now {now:.3f} s, ratio {now / seconds:.3f}")


def measured(checkout: Path, ranks: int, rest: list[str]) -> Seconds:
    """Errors: CalledProcessError, with what the run printed."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return seconds_of(printed(checkout, [*launch, "-m", "tests.bench.iteration", *rest]))


def measured_experts(checkout: Path, rest: list[str]) -> Seconds:
    """As `measured`."""
    found = EXPERTS_ROW.findall(printed(checkout, ["-m", "tests.bench.experts", "--rounds", "1", *rest]))
    assert found, "tests.bench.experts has printed no cut"
    return {f"experts, {cut}": float(seconds) for cut, seconds in found}


def printed(checkout: Path, arguments: list[str]) -> str:
    """Errors: CalledProcessError, with what the run printed."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE, check=True).stdout


def seconds_of(output: str) -> Seconds:
    found: Seconds = {}
    case = ""
    for line in output.splitlines():
        if title := TITLE.search(line):
            case = f"{title[1]}, {title[2]}"
        elif row := ROW.match(line):
            found[case] = float(row[1])
    assert found, f"no table of tests.bench.iteration in: {output[-2000:]}"
    return found


def median_of(rows: list[Seconds]) -> Seconds:
    return {case: statistics.median(row[case] for row in rows) for case in rows[0]}


def shown(seconds: Seconds) -> str:
    return "; ".join(f"{case} {value:.3f} s" for case, value in seconds.items())


if __name__ == "__main__":
    main()
