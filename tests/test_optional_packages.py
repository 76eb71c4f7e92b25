"""Tests that need packages which the project's environment lacks, in one that has them."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.launch import of_no_rank
from tests.packages import python_with

ROOT = Path(__file__).parents[1]
PACKAGES = ("reasoning-gym==0.1.25", "textarena==0.7.4", "skyrl-gym==0.4.0")
FILES = (
    "tests/data/test_gym_files.py",
    "tests/rewards/test_gym.py",
    "tests/rewards/test_gym_runs.py",
    "tests/environments/test_adapters.py",
)
ABSENT = "the package is there"  # the reason of tests of what is said without a package
SECONDS = 850


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with these packages beside those of this one."""
    return python_with(tmp_path_factory.mktemp("packages"), PACKAGES, beside=sysconfig.get_paths()["purelib"])


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.timeout(2 * SECONDS + 60)  # the install and the tests
def test_those_of_reasoning_gym_and_of_adapters(python: Path) -> None:
    command = [python, "-m", "pytest", "-q", "-rs", "--set", "all", "-p", "no:cacheprovider", *FILES]
    environment = of_no_rank(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    told = ran.stdout[-4000:]
    assert ran.returncode == 0, told
    skipped = [line for line in ran.stdout.splitlines() if line.startswith("SKIPPED") and ABSENT not in line]
    assert skipped == [] and " passed" in told, told
