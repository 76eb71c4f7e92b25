"""What starts processes is marked, has time, and does not run beside its like."""

from collections.abc import Iterator

import pytest

from tests import launch

SECONDS = 5 * launch.SECONDS  # a module's fixture makes four launches at most, each of which ends by itself


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist's `--dist loadgroup`: all distributed tests in one worker, each other file in any one."""
    for item in items:
        if item.get_closest_marker("distributed"):
            item.add_marker(pytest.mark.xdist_group("distributed"))
            item.add_marker(pytest.mark.timeout(SECONDS))
        else:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """`tests.launch` starts no ranks for a test without the mark, whichever fixture asks for them."""
    token = launch.MARKED.set(item.get_closest_marker("distributed") is not None)
    try:
        return (yield)
    finally:
        launch.MARKED.reset(token)
