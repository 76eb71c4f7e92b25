"""The parts of `python -m tests.gpu` as far as a CPU can: a report on a GPU is not to fail by its own mistakes."""

from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import main
from tests.gpu.parts import PARTS, Line
from tests.gpu.speed_worker import Steps, idle_share

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


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0, 10), (5, 20), (40, 50)], 0.4),
        ([(7, 9)], 0.0),
        ([(0, 10), (2, 4), (10, 30)], 0.0),
        ([(5, 10), (30, 35)], 2 / 3),
    ],
)
def test_the_share_of_time_without_a_kernel(spans: list[tuple[int, int]], share: float) -> None:
    """Kernels of two streams may overlap, and one may lie within another."""
    assert idle_share(spans) == pytest.approx(share)


def test_a_step_takes_the_time_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 1.6, 1.7])
    monkeypatch.setattr("tests.gpu.speed_worker.time.perf_counter", lambda: next(clock))
    steps = Steps(lambda: "output")
    assert [steps() for _ in range(4)] == ["output"] * 4
    assert steps.milliseconds() == pytest.approx(700 / 3)
