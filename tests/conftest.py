"""What starts ranks is marked, has time, and does not run beside its like, unless one of the two mostly waits."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import launch

MARK = "distributed"
SECONDS = 5 * launch.SECONDS  # a module's fixture makes four launches at most, each of which ends by itself


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker(MARK):
            item.add_marker(pytest.mark.timeout(SECONDS))
    if hasattr(config, "workerinput"):  # of pytest-xdist: what takes longest begins first
        items.sort(key=lambda item: not _starts_ranks(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """`tests.launch` starts no ranks for a test without the mark, whichever fixture asks for them."""
    token = launch.MARKED.set(item.get_closest_marker(MARK) is not None)
    try:
        return (yield)
    finally:
        launch.MARKED.reset(token)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker has the files that start ranks, which fill the cores by themselves, but for those that wait most of
    the time, for disks, deadlines and the ends of processes: another has these. Any has any of the other files.

    pytest-xdist 3.8.0 has groups of tests for that, by a suffix of their ids, which pytest 9.2 does not let it append.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            if not _starts_ranks(config.rootpath / file):
                return file
            waits = "/checkpoint/" in file or "/launcher/" in file or file.endswith("test_faults.py")
            return f"{MARK}, waiting" if waits else MARK

    config.option.loadscopereorder = False  # not the files with the most tests first
    return Scheduling(config, log)


@functools.cache
def _starts_ranks(file: Path) -> bool:
    return f"pytest.mark.{MARK}" in file.read_text()
