"""Which tests a set has, which worker runs them, and what those that start ranks are given.

Sets (`--set`, `launch/test.sh`): `default` has what matters most of each room; `rest` has the tests marked `thorough`;
`gate` is both, in one session; `weekly` has those marked `weekly`, which neither has; `all` is all three. `fast` has
what of `default` starts no ranks, compiles nothing and is quick: what takes seconds all the same is marked `slow`. A
run that names its tests, by path, `-k` or `-m`, takes them from `all`.
"""

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.cpu.kernels import library as libraries
from tests import launch

MARK, COMPILES, THOROUGH, SLOW, WEEKLY = "distributed", "compiles", "thorough", "slow", "weekly"


def _has(item: pytest.Item, *marks: str) -> bool:
    return any(item.get_closest_marker(mark) is not None for mark in marks)


SETS: dict[str, Callable[[pytest.Item], bool]] = {
    "default": lambda item: not _has(item, THOROUGH, WEEKLY),
    "rest": lambda item: _has(item, THOROUGH) and not _has(item, WEEKLY),
    "gate": lambda item: not _has(item, WEEKLY),
    "weekly": lambda item: _has(item, WEEKLY),
    "all": lambda item: True,
    "fast": lambda item: not _has(item, MARK, COMPILES, THOROUGH, SLOW, WEEKLY),
}
SECONDS = 5 * launch.SECONDS  # a module's fixture makes four launches at most, each of which ends by itself
# Of the files that start ranks, which one worker has: those whose ranks wait most of the time, for deadlines, other
# hosts, the ends of processes; those whose ranks fill the cores; and the others.
GROUPS = {
    "waiting": (
        "tests/checkpoint/test_stops.py",
        "tests/distributed/test_faults.py",
        "tests/launcher/",
        "tests/parallel/test_faults.py",
        "tests/test_docs_runs.py",  # fills the cores, and comes last here: this worker has the least to do
    ),
    # whose fork bomb leaves nothing for others: it comes last here, when most of them are done
    "filling": ("tests/checkpoint/", "tests/distributed/", "tests/rewards/test_misbehaviour.py"),
}
OTHERS = "others"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hybridflow")
    group.addoption(
        "--set", choices=list(SETS), help=f"which tests: {', '.join(SETS)}; default: default, with a path, -k or -m all"
    )
    group.addoption("--shard", type=_shard, default=(1, 1), metavar="K/N", help="the K-th of N parts, cut by files")


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"--shard {text}: K/N, with K from 1 to N")
    return int(part), int(parts)


def pytest_configure(config: pytest.Config) -> None:
    """The workers of pytest-xdist get the set from here. However pytest is called, a process has one thread, as in
    launch/test.sh: sums over threads come in another order."""
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    config.stash[STARTED] = time.monotonic()
    if config.option.set is None:
        named = config.args_source is config.ArgsSource.ARGS or config.option.keyword or config.option.markexpr
        config.option.set = "all" if named else "default"


STARTED = pytest.StashKey[float]()


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = config.option.shard
    files = sorted({item.path for item in items}, key=lambda path: (not _starts_ranks(path), path))
    wanted = set(files[part - 1 :: parts])  # files that start ranks are dealt out first, to all parts alike
    kept, left = [], []
    for item in items:
        (kept if SETS[config.option.set](item) and item.path in wanted else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
    items[:] = kept
    for item in items:
        if item.get_closest_marker(MARK):
            item.add_marker(pytest.mark.timeout(SECONDS))
    if hasattr(config, "workerinput"):  # of pytest-xdist: what takes longest begins first
        items.sort(key=lambda item: not _starts_ranks(item.path))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many tests that was, how long, and how to run all."""
    if config.option.set == "all":
        return
    ran = sum(len(terminalreporter.getreports(outcome)) for outcome in ("passed", "failed"))
    seconds = round(time.monotonic() - config.stash[STARTED])
    took = f"{seconds // 60} min {seconds % 60:02d} s"
    terminalreporter.write_line(
        f"{config.option.set} set: {ran} tests in {took}; all of them: bash launch/test.sh --all"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """`tests.launch` starts no ranks for a test without the mark, whichever fixture asks for them."""
    token = launch.MARKED.set(item.get_closest_marker(MARK) is not None)
    try:
        return (yield)
    finally:
        launch.MARKED.reset(token)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """What a module's fixture writes goes with the fixture, unless a test failed meanwhile. Else the gate's runs and
    checkpoints need 20 GB of disk at the end. The empty directory stays, so that no other one has the same path: there
    are caches by path."""
    if fixturedef.scope != "module" or "tmp_path_factory" not in fixturedef.argnames:
        return (yield)
    base = request.getfixturevalue("tmp_path_factory").getbasetemp()
    before, failed = set(base.iterdir()), request.session.testsfailed

    def remove() -> None:
        if request.session.testsfailed == failed:
            for made in written:
                shutil.rmtree(made, ignore_errors=True)
                made.mkdir(exist_ok=True)

    fixturedef.addfinalizer(remove)
    written: set[Path] = set()  # nothing where the fixture itself fails
    found = yield
    written.update(set(base.iterdir()) - before)
    return found


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Callable[..., set[Any]]:
    """The values that the module's selected tests have for parameters: a launch runs no case that nobody looks at."""

    def values(*names: str) -> set[Any]:
        items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
        calls = [item.callspec.params for item in items]
        found = {tuple(call[name] for name in names) for call in calls if call.keys() >= set(names)}
        return {call[0] for call in found} if len(names) == 1 else found

    return values


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> set[str]:
    """Those that the module's selected tests look at, by their marks: a launch runs no others."""
    items = [item for item in request.session.items if item.path == request.path]
    return {name for item in items for mark in item.iter_markers("cases") for name in mark.args}


@pytest.fixture(scope="session")
def needs_kernels() -> None:
    if reason := libraries.why_not():
        pytest.skip(f"no kernels: {reason}")


@pytest.fixture(autouse=True)
def compiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test without the mark has no kernels in C, so that a set without marked tests needs no compiler."""
    if not request.node.get_closest_marker(COMPILES) and not request.node.get_closest_marker(MARK):
        monkeypatch.setattr(libraries, "_given_up", ["this test is not marked as one that compiles"])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker has the files whose ranks fill the cores, one those whose ranks wait, one other files with ranks, of
    which each would make rank servers of its own. Any has any of the files that start none.

    pytest-xdist 3.8.0 has groups of tests for that, by a suffix of their ids, which pytest 9.2 does not let it append.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            if not _starts_ranks(config.rootpath / file):
                return file
            return next((group for group, files in GROUPS.items() if file.startswith(files)), OTHERS)

    config.option.loadscopereorder = False  # not the files with the most tests first
    return Scheduling(config, log)


@functools.cache
def _starts_ranks(file: Path) -> bool:
    return f"pytest.mark.{MARK}" in file.read_text()
