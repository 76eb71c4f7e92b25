"""How a run that fails ends: its error is printed whatever else is broken, and the process is gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.cli import train
from hybridflow.cli.command import as_typed
from hybridflow.config.files import read_tree
from hybridflow.config.kinds import config_class
from hybridflow.config.shipped import shipped_configs

ROOT = Path(__file__).resolve().parents[1]
# a run whose error is `error`, in a process of its own, since it ends at once
PROGRAM = """
import sys
from hybridflow.cli import train
from hybridflow.errors import ConfigError
{setting}
def fail(options):
    raise {error}
train._ended_ranks = lambda options, given: None  # as in a rank
train._train = fail
train.main(["config.yaml"])
"""
GONE = """
import torch.distributed as dist
from hybridflow.parallel import platform
dist.is_initialized = lambda: True
def gone():
    raise dist.DistNetworkError("Connection was likely closed")
dist.distributed_c10d._get_default_store = gone
"""
NO_TORCH = "sys.modules['torch'] = None"  # importing it fails
CLOSED = "sys.stderr.close()"


def end(setting: str, error: str) -> subprocess.CompletedProcess:
    program = PROGRAM.format(setting=setting, error=error)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["", GONE, NO_TORCH], ids=["", "the store is gone", "torch is broken"])
def test_the_error_is_printed(setting: str) -> None:
    done = end(setting, "ConfigError('actor.dtype = 3')")
    assert (done.returncode, done.stderr) == (1, "hybridflow: error: actor.dtype = 3\n")


def test_an_error_of_ours_is_printed_with_its_place_where_the_store_is_gone() -> None:
    done = end(GONE, "ZeroDivisionError('by nothing')")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("ZeroDivisionError: by nothing\n")


def test_a_process_whose_output_nobody_takes_ends_as_well() -> None:
    assert end(CLOSED, "ConfigError('unseen')").returncode == 1


def test_options_may_stand_between_overrides(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    command = [sys.executable, "-m", "hybridflow.train", str(missing), "--num-iterations", "2", "seed=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"{missing}: cannot be read" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("name", "exported", "commands"),
    [
        ("quickstart", True, ["report", "samples", "chat"]),
        ("quickstart", False, ["report", "samples", "checkpoints"]),
        ("quickstart_sft", True, ["report", "chat"]),
        ("quickstart_dpo", True, ["report", "chat"]),
        ("quickstart_reward_model", True, ["report"]),  # it writes no text
    ],
)
def test_what_to_do_next_fits_the_run(
    name: str, exported: bool, commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "as_typed", lambda: "hybridflow")
    file = shipped_configs() / f"{name}.yaml"
    config = config_class(tree := read_tree(file, ["name=x"])).from_tree(tree, file)
    assert train.next_commands(config, exported=exported) == [f"hybridflow {command} runs/x" for command in commands]


def test_commands_to_copy_are_found_by_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / ".venv" / "bin" / "hybridflow"
    script.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert as_typed() == "python -m hybridflow"
    script.touch(mode=0o755)
    assert as_typed() == ".venv/bin/hybridflow"  # nobody has activated .venv
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert as_typed() == str(script)
    monkeypatch.setenv("PATH", str(script.parent))
    assert as_typed() == "hybridflow"
