"""What functions are, told by another process; what their modules do when they are imported is not done here."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards.probe import Described, described

HARMLESS = """
import os, signal, sys
print("printed at the import")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.alarm(1)
os.chdir("/")
LIMIT = 3

def plain(prompts, responses, columns, *, unit="cm"): ...
async def waits(prompts, responses, columns): ...

class Called:
    async def __call__(self, prompts, responses, columns): ...

called = Called()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "scouted_rewards.py"
    file.write_text(HARMLESS)
    (tmp_path / "deadly_rewards.py").write_text(
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1234.5)'])\n"
        "os._exit(7)\n"
    )
    return file


def test_functions_are_described_and_nothing_of_them_is_here(module: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), os.getcwd()
    wanted = [("scouted_rewards:plain", {"unit": "m"}), ("scouted_rewards:waits", {}), ("scouted_rewards:called", {})]
    found = described([*wanted, ("hybridflow.rewards:exact_match", {})])
    assert found[:3] == [Described(awaited, str(module), ()) for awaited in (False, True, True)]
    assert not found[3].awaited and found[3].file is not None and found[3].file.endswith("rewards/__init__.py")
    assert "scouted_rewards" not in sys.modules and (signal.getsignal(signal.SIGTERM), os.getcwd()) == before
    assert described([]) == []


@pytest.mark.parametrize(
    ("path", "arguments", "expected"),
    [
        ("scouted_rewards:LIMIT", {}, "is a int, which cannot be called"),
        ("scouted_rewards:absent", {}, "has no absent"),
        ("scouted_rewards:plain", {"size": 1}, "got an unexpected keyword argument 'size'"),
        ("scouted_rewards", {}, "expected package.module:function"),
        ("absent_rewards:f", {}, "cannot import absent_rewards: ModuleNotFoundError"),
        (
            "deadly_rewards:f",
            {},
            "the process that imports deadly_rewards did not answer: it ended with exit status 7",
        ),
    ],
)
def test_the_first_that_cannot_be_called_is_told(module: Path, path: str, arguments: dict, expected: str) -> None:
    with pytest.raises(RewardError, match=f"reward function '?{path}.*{expected}"):
        described([("scouted_rewards:plain", {}), (path, arguments), ("absent:g", {})])
    until = time.monotonic() + 10
    while any(b"time.sleep(1234.5)" in read(file) for file in Path("/proc").glob("[0-9]*/cmdline")):
        assert time.monotonic() < until
        time.sleep(0.01)


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
