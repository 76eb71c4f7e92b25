"""An iteration of ours beside TRL's trainers and a hand-written loop: same models, prompts, tokens and optimizer steps.

    python -m tests.bench.peers --environment DIR [--workload fixed varying groups] [--size S M] [--rounds 3]

DIR gets a virtual environment with the peers where it has none, and in DIR/work the models, the logs and all numbers
(results.json). Programs run one at a time, in turn, on the same two CPUs with two threads: A B C A B C. Of each round
counts the median of its iterations, without the first; the matrix-product rate is measured in every round. Nothing else
should run: the load average is printed.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

from tests.bench.peer_programs.environment import peer_python
from tests.bench.peer_programs.inputs import make_models, make_prompts, response_lengths
from tests.bench.peer_programs.programs import PROGRAMS, THREADS, Program, programs, run, run_program, torchrun
from tests.bench.peer_programs.report import CONSOLE, Case, print_case
from tests.bench.peer_programs.workload import SIZES, WORKLOADS, Job, Measured, prompt_ids

FLAGS = ("avx2", "fma", "avx512", "amx")  # of a CPU, by their beginnings: what matrix products are made of
HALF_PRECISION = ("avx512_bf16", "amx_bf16")
Rounds = dict[str, dict[str, list[Measured]]]  # by case and program


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what has been started ends too
    os.sched_setaffinity(0, options.cpus or sorted(os.sched_getaffinity(0))[:THREADS])
    python = peer_python(options.environment.absolute())
    work = options.environment.absolute() / "work"
    work.mkdir(exist_ok=True)
    print_machine()
    cases = [
        Case(name, WORKLOADS[name], size, SIZES[size], dtype)
        for name in options.workload
        for size in options.size
        for dtype in options.dtype
    ]
    make_inputs(work, cases)
    rounds: Rounds = defaultdict(lambda: defaultdict(list))
    rates: list[dict[str, float]] = []
    for number in range(1, options.rounds + 1):
        rates.append(product_rates(work, options.dtype))
        for case in cases:
            for program in programs(case.workload, case.dtype):
                measured = timed(program, case, work, python, options.iterations, number)
                rounds[str(case)][program.name].append(measured)
        write_results(work / "results.json", rates, rounds)
    for case in cases:
        tokens = sum(map(len, prompt_ids(str(prompts_of(work, case))))) * case.workload.sequences // 64
        print_case(case, rounds[str(case)], prompt_tokens=tokens, rates=[rate[case.dtype] for rate in rates])
    print_differences(cases)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, required=True, help="directory of the peers' environment")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=dtypes_here())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=3, help="measured in a round, after one that is not")
    parser.add_argument("--cpus", nargs=THREADS, type=int, help="default: the first two that this process may use")
    return parser.parse_args()


def cpu_flags() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return [flag for flag in flags if flag.startswith(FLAGS)]


def dtypes_here() -> list[str]:
    """bfloat16 where the machine has instructions for it."""
    return ["float32"] + (["bfloat16"] if set(HALF_PRECISION) & set(cpu_flags()) else [])


def print_machine() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    CONSOLE.print(f"{model}: {os.cpu_count()} CPUs, of which {sorted(os.sched_getaffinity(0))} are used")
    CONSOLE.print(f"flags: {' '.join(cpu_flags())}")
    CONSOLE.print(f"load average before the first round: {os.getloadavg()}")


def models_of(work: Path, case: Case) -> Path:
    return work / (f"{case.size_name}_counting" if case.workload.ends else case.size_name)


def prompts_of(work: Path, case: Case) -> Path:
    return work / f"{case.name}.jsonl"


def make_inputs(work: Path, cases: list[Case]) -> None:
    made = set()
    for case in cases:
        if (directory := models_of(work, case)) not in made:
            make_models(directory, case.size, ends=case.workload.ends)
            made.add(directory)
        make_prompts(prompts_of(work, case), case.workload, case.size.vocab)


def product_rates(work: Path, dtypes: list[str]) -> dict[str, float]:
    """FLOP/s by dtype, of both CPUs at once."""
    file = work / "product_rate.json"
    command = torchrun(sys.executable, THREADS, f"{PROGRAMS}.product_rate", str(file), *dtypes)
    run(command, file.with_suffix(".log"), threads=1)
    return json.loads(file.read_text())


def timed(program: Program, case: Case, work: Path, python: Path, iterations: int, number: int) -> Measured:
    """One run of a program, on files of its own."""
    slug = "".join(c if c.isalnum() else "_" for c in f"{case} {program.name}")
    scratch = work / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    job = Job(
        case.workload, str(models_of(work, case)), str(prompts_of(work, case)), case.dtype, iterations, str(scratch)
    )
    load, started = os.getloadavg()[0], time.monotonic()
    measured = run_program(program, job, work / f"{slug}.json", python)
    totals = " ".join(f"{row['total']:.2f}" for row in measured.seconds)
    took = time.monotonic() - started
    CONSOLE.print(f"round {number}, {case}, {program.name}: {totals} s (load {load:.1f}; {took:.0f} s in all)")
    check_tokens(case, measured, program)
    return measured


def check_tokens(case: Case, measured: Measured, program: Program) -> None:
    """Everybody has generated as many tokens, but for a response that goes astray once in a while."""
    expected = sum(response_lengths(case.workload)) * case.workload.sequences // 64
    for tokens in measured.response_tokens:
        strays = case.workload.ends and abs(tokens - expected) <= 2 * case.workload.max_response
        assert tokens == expected or strays, f"{case}: {program.name} has {tokens} response tokens, not {expected}"


def write_results(path: Path, rates: list[dict[str, float]], rounds: Rounds) -> None:
    shown = {
        case: {name: [dataclasses.asdict(m) for m in ms] for name, ms in of.items()} for case, of in rounds.items()
    }
    path.write_text(json.dumps({"flags": cpu_flags(), "product_rates": rates, "rounds": shown}, indent=1))


def print_differences(cases: list[Case]) -> None:
    CONSOLE.print("What each does differently:")
    every = {program.name: program for case in cases for program in programs(case.workload, case.dtype)}
    for program in every.values():
        kind = (
            f"{program.processes} process{'es' * (program.processes > 1)} of {THREADS // program.processes} thread(s)"
        )
        CONSOLE.print(f"- {program.name} ({kind}): {program.differs}")


if __name__ == "__main__":
    main()
