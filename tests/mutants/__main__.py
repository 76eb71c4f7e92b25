"""Faults that the tests must find, and whether they do.

    python -m tests.mutants map                  which test files run which functions: both sets, once, under coverage
    python -m tests.mutants run [NAME ...]       each mutant alone: the tests that found it, those that run what it
                                                 changes, then all others; of the default set first, then of the rest
    python -m tests.mutants check                the tests that find them, without a fault: all pass

A mutant is killed by the first test that fails, or whose ranks hang: they have `RANKS_SECONDS`. `run` writes table.md.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from tests.mutants.patch import ROOT, Mutant, Runs, mutants
from tests.mutants.table import TABLE, Killed, read_table, written_table

MAP = ROOT / "test-results" / "functions.json"
NEAREST = 8  # test files that go first: to collect all that run a function may take longer than to run these
RANKS_SECONDS, HANG = 180, "no end after "  # of tests.launch
SETS = ("default", "rest")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/[^\s:]+(?:::[^\s\[]+)?)", re.MULTILINE)
PASSED, SOME_FAILED, NO_TESTS = 0, 1, 5  # statuses of pytest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["map", "run", "check"])
    parser.add_argument("names", nargs="*", help="of mutants; without one, of all")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument(
        "--until",
        choices=["row", "reached", "all"],
        default="all",
        help="leave out the tests behind those of the mutant's row, or behind those that run what it changes",
    )
    given = parser.parse_intermixed_args(arguments)
    chosen = [mutant for mutant in mutants() if not given.names or mutant.name in given.names]
    if unknown := set(given.names) - {mutant.name for mutant in chosen}:
        parser.error(f"no patch of this name: {', '.join(sorted(unknown))}")
    match given.what:
        case "map":
            return make_map()
        case "check":
            return check(chosen)
        case _:
            return run(chosen, given.jobs, until=given.until)


# ------------------------------------------------------------------------------------------------ the map


def make_map() -> int:
    """With coverage, which nothing else needs."""
    from tests.mutants.contexts import FILE, read_map, settings

    MAP.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "coveragerc")
        config.write_text(settings(Path(directory)), encoding="utf-8")
        environment = {"COVERAGE_RCFILE": str(config), "COVERAGE_PROCESS_START": str(config), FILE: ""}
        watched = ["-m", "coverage", "run", "-m", "pytest", "-p", "tests.mutants.contexts", "-n", "3"]
        for each in SETS:
            pytest(ROOT, [*watched, "--set", each], environment, quiet=False)
        MAP.write_text(json.dumps(read_map(Path(directory).glob("data*")), indent=0), encoding="utf-8")
    print(f"{MAP}: written")
    return 0


# ------------------------------------------------------------------------------------------------ a mutant


@dataclass(frozen=True)
class Stage:
    """Tests that are run together, until one fails. files: none: all of the set."""

    set: str
    files: tuple[str, ...]


def stages(mutant: Mutant, known: Killed | None, runs: Runs, *, until: str) -> list[Stage]:
    found = [] if known is None or not known.test else [Stage(known.set, (known.test,))]
    if until == "row":
        return found
    reach = Counter(test for tests in runs.values() for test in tests)
    own = {test for name in mutant.functions(ROOT) for test in runs.get(name, []) if (ROOT / test).exists()}
    ordered = sorted(own, key=lambda test: (_starts_ranks(test), reach[test], test))  # what runs least is nearest
    parts = [part for part in (tuple(ordered[:NEAREST]), tuple(ordered[NEAREST:])) if part]
    reached = [Stage(each, part) for each in SETS for part in parts]
    return [*found, *reached, *(Stage(each, ()) for each in SETS if until == "all")]


def _starts_ranks(test: str) -> bool:
    return "pytest.mark.distributed" in (ROOT / test).read_text(encoding="utf-8")


def run(chosen: Sequence[Mutant], jobs: int, *, until: str) -> int:
    table, runs, lock = read_table(), json.loads(MAP.read_text()) if MAP.exists() else {}, Lock()
    if not runs and until != "row":
        print(f"{MAP} is not there: without it a mutant that survives the tests of its row meets all tests")

    def one(mutant: Mutant) -> bool:
        began, known = time.monotonic(), table.get(mutant.name)
        result = killed(mutant, stages(mutant, known, runs, until=until))
        with lock:
            if result.test or until == "all":
                table[mutant.name] = result
                TABLE.write_text(written_table(mutants(), table), encoding="utf-8")
            said = f"{result.set}: {result.test}" if result.test else "SURVIVES"
            print(f"{mutant.name:36} {time.monotonic() - began:6.0f} s  {said}", flush=True)
        return bool(result.test)

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, chosen))
    print(f"{sum(found)} of {len(found)} mutants killed")
    return 0 if all(found) else 1


def killed(mutant: Mutant, of_stages: Sequence[Stage]) -> Killed:
    """By which test; by none where it survives all stages."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        root = Path(directory, "tree")
        copy_tree(root)
        mutant.put_into(root)
        for stage in of_stages:
            if found := first_to_fail(root, stage):
                return Killed(stage.set, found)
    return Killed("", "")


def first_to_fail(root: Path, stage: Stage) -> str | None:
    """Where ranks hang, only if they do not without the fault: the machine may be slow."""
    command, slow = ["-m", "pytest", "-x", "-q", "-n", "0", "--set", stage.set], list[str]()
    while True:
        status, out = pytest(root, [*command, *(f"--deselect={test}" for test in slow), *stage.files])
        if status in (PASSED, NO_TESTS):
            return None
        found = FAILED.search(out)
        if status != SOME_FAILED or not found:
            raise RuntimeError(f"pytest ended with {status}\n{out[-4000:]}")
        if HANG not in out or pytest(ROOT, [*command, found[1]])[0] in (PASSED, NO_TESTS):
            return found[1]
        slow.append(found[1].partition("::")[0])


def check(chosen: Sequence[Mutant]) -> int:
    table = read_table()
    tests = sorted({table[mutant.name].test for mutant in chosen if mutant.name in table} - {""})
    return pytest(ROOT, ["-m", "pytest", "-q", "-n", "3", "--set", "gate", *tests], quiet=False)[0]


def copy_tree(target: Path) -> None:
    """What git tracks, as it is in the working tree, and what is new there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (source := ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)
    subprocess.run(["git", "init", "--quiet"], cwd=target, check=True)  # `git apply` looks for no repository around it


def pytest(
    root: Path, command: list[str], more: dict[str, str] | None = None, *, quiet: bool = True
) -> tuple[int, str]:
    """(status, output) of Python with the package of the tree."""
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "HYBRIDFLOW_RANKS_SECONDS": str(RANKS_SECONDS),
        **(more or {}),
    }
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
