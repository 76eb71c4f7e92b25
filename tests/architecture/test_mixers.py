"""A token mixer, or an MLP, that leaves an answer out: no plan and no run starts, and mypy refuses it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.architecture.mixers.mixer import TokenMixer
from hybridflow.architecture.mlps.mlp import Mlp

ROOT = Path(__file__).resolve().parents[2]
NO_CASE = """
from typing import Literal, assert_never

from hybridflow.architecture.mixers.attention import AttentionMixer
from hybridflow.architecture.mixers.mixer import TokenMixer


class Silent(TokenMixer):
    fuses_norm, title, gathers_again = True, "silence", False


def made(name: Literal["attention", "silence"]) -> TokenMixer:
    match name:
        case "attention":
            return AttentionMixer()
    assert_never(name)


Silent()
"""


@pytest.mark.parametrize("base", [TokenMixer, Mlp])
def test_who_leaves_an_answer_out_cannot_be_made(base: type) -> None:
    answers = sorted(base.__abstractmethods__)
    assert len(answers) > 6
    whole = {name: lambda self: None for name in answers}
    type("Whole", (base,), whole)()
    for name in answers:
        less = {other: answer for other, answer in whole.items() if other != name}
        with pytest.raises(TypeError, match=rf"abstract method '?{name}'?"):
            type("Less", (base,), less)()


def test_with_a_name_that_no_mixer_has_no_plan_and_no_run_starts() -> None:
    names = "kinds.MixerName = kinds.Literal[(*kinds.MixerName.__args__, 'silence')]"
    code = f"from hybridflow.architecture import layer_kinds as kinds; {names}; import hybridflow.placement.placed"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (
        found.returncode == 1 and "AssertionError: Expected code to be unreachable, but got: 'silence'" in found.stderr
    )


@pytest.mark.thorough
def test_who_leaves_an_answer_or_a_case_out_does_not_type_check(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(NO_CASE)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "silent.py")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert 'Cannot instantiate abstract class "Silent" with abstract attributes' in found.stdout, found
    assert 'Argument 1 to "assert_never" has incompatible type' in found.stdout
