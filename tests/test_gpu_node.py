"""The first hour on 8 GPUs, `python -m tests.gpu node`: in small on CPUs, and steps that end badly."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from tests.gpu.node import Step, main, run_steps
from tests.gpu.node_steps import STEPS

TELLS = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2] + chr(10))"


def telling(name: str, *, right: bool = True, then: str = "") -> Step:
    figure = json.dumps(["sum", "2", right])
    return Step(name, 60, lambda folder: [sys.executable, "-c", TELLS + then, str(folder / f"{name}.jsonl"), figure])


def test_steps_that_fail_and_hang_do_not_end_the_others(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    steps = [
        telling("breaks", then="; raise ValueError('this breaks')"),
        Step("hangs", 1, lambda folder: ["sh", "-c", "sleep 600 & echo waits for $!; wait"]),
        telling("differs", right=False),
        Step("silent", 60, lambda folder: ["true"]),
        telling("works"),
    ]
    assert not run_steps(steps, tmp_path / "report.md", "versions\n", {})
    told = [line.split(" s: ") for line in capsys.readouterr().out.splitlines()]
    verdicts = ["failed", "timed out", "failed", "failed", "ok"]
    begins = [f"step {i}/5 {step.name}: {x}, " for i, (step, x) in enumerate(zip(steps, verdicts, strict=True), 1)]
    assert all(line[0].startswith(begin) for line, begin in zip(told, begins, strict=True))
    assert [line[1] for line in told] == ["sum: 2", "no figures", "WRONG sum: 2", "no figures", "sum: 2"]
    _, breaks, hangs, differs, _, works = (tmp_path / "report.md").read_text().split("\n## ")
    assert "- ok: sum: 2\n" in breaks and "ValueError: this breaks" in breaks
    started = int(hangs.split("waits for ")[1].split()[0])
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE
    assert "- WRONG: sum: 2\n" in differs
    assert "- ok: sum: 2\n" in works and "```" not in works


def test_a_machine_without_8_gpus_is_told_of_the_small_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for arguments, problem in (([], "4 GPUs here, 8 are needed; --tiny"), (["--tiny", "link"], "no step link; there")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert problem in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.weekly
def test_all_steps_in_small(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["--tiny", "--out", str(tmp_path / "report.md")]) == 0, capsys.readouterr().out
    told = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == [f"step {number}/8 {name}: ok" for number, name in enumerate(STEPS, 1)]
    head, *sections = (tmp_path / "report.md").read_text().split("\n## step ")
    assert "vllm" in head and [section.split(",")[0] for section in sections] == [line[5:] for line in told]
