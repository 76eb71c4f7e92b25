"""A Python that has verifiers, and a taskset that it finds."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages import python_with

RELEASE = "0.4.0"
ENVS = Path(__file__).parent / "verifiers_envs"
GIVEN = "HYBRIDFLOW_TEST_VERIFIERS_PYTHON"  # one that has verifiers, in the place of the fixture's


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    if GIVEN in os.environ:
        return os.environ[GIVEN]
    return str(python_with(tmp_path_factory.mktemp("verifiers"), [f"verifiers=={RELEASE}"]))


@pytest.fixture(scope="module")
def found_there() -> Iterator[None]:
    """As if the taskset were installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ENVS), os.environ.get("PYTHONPATH", "")]))
        yield
