"""The parts of `python -m tests.gpu` as far as a CPU can: a report on a GPU is not to fail by its own mistakes."""

from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import main
from tests.gpu.parts import PARTS, Line

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them on the GPU")
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_the_part_is_right_on_a_cpu(part, tmp_path: Path) -> None:
    lines: list[Line] = part(torch.device("cpu"), tmp_path)
    assert len(lines) >= 2 and [line for line in lines if not line.right] == []


def test_the_report_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def sums(device: torch.device, folder: Path) -> list[Line]:
        return [Line("one", "1"), Line("two", "3", right=False)]

    def breaks(device: torch.device, folder: Path) -> list[Line]:
        raise ValueError("this breaks")

    monkeypatch.setattr("tests.gpu.__main__.PARTS", (sums, breaks))
    assert main([]) == 1
    told = capsys.readouterr().out
    assert "ok     one: 1" in told and "WRONG  two: 3" in told and "this breaks" in told and told.endswith("2 wrong\n")
    assert main(["sum"]) == 2
