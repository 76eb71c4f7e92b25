"""The one command: what a person types first works, and what is wrong is said in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.cli.command import error_text
from hybridflow.cli.main import COMMANDS, main
from tests.launch import ROOT, of_no_rank

HEAVY = {"torch", "transformers", "vllm", "megatron"}
HELP = """
import sys
from hybridflow.cli.main import main
try:
    status = main({arguments})
except SystemExit as left:
    status = left.code
assert status == 0, status
loaded = {heavy} & set(sys.modules)
assert not loaded, loaded
"""


def test_no_command_and_help_tell_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("usage: hybridflow COMMAND")
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == error
    assert all(f"\n    {name} " in error for name in COMMANDS)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("plna", "plna: is no command and no config file; did you mean hybridflow plan?"),
        ("X", "X: is no command and no config file; commands are train, launch, plan, "),
    ],
)
def test_what_is_neither_command_nor_config(typed: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"hybridflow: error: {told}") and error.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_loads_no_heavy_package(name: str) -> None:
    """Which takes seconds: help and wrong arguments are told at once."""
    code = HELP.format(arguments=[name, "--help"], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: hybridflow {name} ")


@pytest.mark.parametrize("before", [[], ["train"]], ids=["a config alone", "train"])
@pytest.mark.slow
def test_a_config_that_is_not_there_is_told_in_one_line(before: list[str], tmp_path: Path) -> None:
    missing = tmp_path / "mine.yaml"
    command = [sys.executable, "-m", "hybridflow", *before, str(missing)]
    done = subprocess.run(command, cwd=ROOT, env=of_no_rank(), capture_output=True, text=True, timeout=600)
    told = f"hybridflow: error: {missing}: cannot be read: No such file or directory\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)


def test_lines_of_code_in_an_error_can_be_copied() -> None:
    assert error_text("merge it:\n    from peft import x\nor not", "hybridflow plan") == (
        "hybridflow plan: error: merge it:\n    from peft import x\nhybridflow plan: error: or not"
    )
