"""Which test file runs which functions of the package: what `python -m tests.mutants map` has tests and ranks note.

A plugin of pytest, under coverage: `-p tests.mutants.contexts`. Coverage notes lines by context: by test file.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import coverage
import pytest

from tests.mutants.patch import ROOT, Runs, functions_of

FILE = "HYBRIDFLOW_TEST_FILE"  # in the environment: the context of the processes that a test starts
SETTINGS = """
[run]
source_pkgs = hybridflow
data_file = {data}
parallel = True
context = ${{{variable}}}
sigterm = True
patch = subprocess, _exit
disable_warnings = no-data-collected,module-not-measured,module-not-imported,already-imported
"""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    os.environ[FILE] = item.nodeid.partition("::")[0]
    note_context()


def note_context() -> None:
    """From here on, lines are of the test file that the environment names."""
    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(os.environ.get(FILE, ""))


def settings(directory: Path) -> str:
    """Of coverage, whose files lie in the directory."""
    return SETTINGS.format(data=directory / "data", variable=FILE)


def read_map(data_files: Iterable[Path], root: Path = ROOT) -> Runs:
    """What the files of coverage tell of the package below `root`."""
    bodies: dict[str, list[tuple[str, range]]] = {}
    found: dict[str, set[str]] = defaultdict(set)
    for data_file in data_files:
        data = coverage.CoverageData(str(data_file))
        data.read()
        for measured in data.measured_files():
            path = Path(measured)
            if not path.is_relative_to(root):
                continue
            file = str(path.relative_to(root))
            if file not in bodies:
                bodies[file] = list(functions_of(path))
            contexts = {
                line: {name.rpartition("|")[2] for name in names}
                for line, names in data.contexts_by_lineno(measured).items()
            }
            for name, lines in bodies[file]:
                tests = (contexts.get(line, set()) for line in lines)
                found[f"{file}::{name}"].update(test for each in tests for test in each)
    return {name: sorted(test for test in tests if test.startswith("tests/")) for name, tests in sorted(found.items())}
