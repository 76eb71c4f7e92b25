"""What is printed: plain lines into a file, a bar on a terminal, nothing from silent ranks."""

import io
import re

import pytest
import torch
from rich.console import Console

from hybridflow.recording.progress import ProgressDisplay, iteration_line, print_summary, summary_table

METRICS = {
    "time/iteration_seconds": 1.94,
    "reward/score_mean": torch.tensor(0.8124),
    "kl/reference_mean": 0.01234,
    "actor/loss": -0.01,
    "train/tokens_per_sec": 412.3,
    "critic/loss": 3.0,
}


def file_console() -> Console:
    return Console(file=io.StringIO(), width=40)


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"})


def printed(console: Console) -> str:
    """What was written, without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_a_line_shows_what_matters_in_a_fixed_order() -> None:
    expected = "iteration 12/60  score 0.812  kl 0.0123  actor/loss -0.01  412 tok/s  1.9 s"
    assert iteration_line(12, 60, METRICS) == expected


def test_a_line_says_what_slowed_the_iteration() -> None:
    waited = {"time/iteration_seconds": 30.0, "time/slowest_rank": 5.0, "time/slowest_rank_seconds": 6.04}
    assert iteration_line(1, 2, waited) == "iteration 1/2  30.0 s  waited 6.0 s for rank 5"
    assert iteration_line(1, 2, waited | {"time/slowest_rank_seconds": 2.9}) == "iteration 1/2  30.0 s"
    assert (
        iteration_line(1, 2, waited | {"time/iteration_seconds": 2.0, "time/slowest_rank_seconds": 0.9})[-5:] == "2.0 s"
    )
    assert iteration_line(1, 2, {"rollout/preemptions": 12.0}) == "iteration 1/2  12 preemptions"
    assert (
        iteration_line(1, 2, {"rollout/preemptions": 0.0, "speed/iteration_mfu": 0.412}) == "iteration 1/2  mfu 41.2%"
    )


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, "iteration 0/3"),
        ({"eval/accuracy": 0.5}, "iteration 0/3  accuracy 0.5"),
        ({"actor/loss": float("nan")}, "iteration 0/3  actor/loss nan"),
        ({"train/tokens_per_sec": 123456.7}, "iteration 0/3  123457 tok/s"),
    ],
)
def test_absent_metrics_are_left_out(metrics: dict, expected: str) -> None:
    assert iteration_line(0, 3, metrics) == expected


def test_into_a_file_goes_one_plain_line_an_iteration() -> None:
    console = file_console()
    with ProgressDisplay(60, console=console) as progress:
        progress.phase("iteration 12: generating")
        progress.iteration(12, METRICS)
        progress.message("saved [bold]runs/a[/bold] :smile:")
        progress.iteration(13, {})
    assert console.file.getvalue() == (
        "iteration 12/60  score 0.812  kl 0.0123  actor/loss -0.01  412 tok/s  1.9 s\n"
        "saved [bold]runs/a[/bold] :smile:\n"
        "iteration 13/60\n"
    )


def test_on_a_terminal_a_bar_shows_phase_and_metrics() -> None:
    console = terminal()
    with ProgressDisplay(3, console=console) as progress:
        progress.iteration(0, {"eval/accuracy": 0.25})
        progress.phase("iteration 1: [generating]")
        progress.iteration(1, METRICS)
        progress.message("a line above")
        progress.phase("iteration 2: training")
        progress.message("another")
    text = printed(console)
    assert "iteration 1: [generating]" in text
    assert "iteration 2: training" in text
    bars = [line for line in text.splitlines() if "/3" in line]
    last = bars[-1].rsplit("\r", 1)[-1]
    for part in ["1/3", "score 0.812", "accuracy 0.25", "412 tok/s", "eta"]:
        assert part in last
    assert "iteration 2: training" not in text.splitlines()[-1]  # the phase is over


def test_on_a_terminal_evaluations_stay_above_the_bar() -> None:
    """A line each, whole, in order; what lies between two of them is the bar, which is drawn over itself."""
    console = terminal()
    with ProgressDisplay(60, console=console) as progress:
        for iteration in range(1, 13):
            evaluation = {"eval/accuracy": iteration / 20} if iteration % 6 == 0 else {}
            progress.iteration(iteration, METRICS | evaluation)
    shown = [line.rsplit("\r", 1)[-1].rstrip() for line in printed(console).splitlines()]
    assert [line for line in shown if line.startswith("iteration ") and "kl" in line] == [
        iteration_line(6, 60, METRICS | {"eval/accuracy": 0.3}),
        iteration_line(12, 60, METRICS | {"eval/accuracy": 0.6}),
    ]


def test_a_bar_of_long_numbers_fits_eighty_columns() -> None:
    console = terminal()
    with ProgressDisplay(10000, console=console) as progress:
        progress.iteration(9999, {**METRICS, "eval/accuracy": 0.123, "train/tokens_per_sec": 123456.7})
    bars = [line.rsplit("\r", 1)[-1] for line in printed(console).splitlines() if "/10000" in line]
    assert "score 0.812  accuracy 0.123  123457 tok/s" in bars[-1]
    assert len(bars[-1].rstrip()) <= 80


def test_an_exception_ends_the_display_and_passes() -> None:
    console = terminal()
    with pytest.raises(ZeroDivisionError), ProgressDisplay(3, console=console):
        raise ZeroDivisionError
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back
    console.print("after")
    assert "after" in console.file.getvalue()


def test_the_default_console_is_standard_output(capsys: pytest.CaptureFixture) -> None:
    with ProgressDisplay(2) as progress:
        progress.iteration(1, {})
    print_summary("done", [("a", "b")])
    out = capsys.readouterr().out
    assert out.startswith("iteration 1/2\n")
    assert "done" in out


def test_a_summary_shows_values_as_they_stand() -> None:
    console = file_console()
    print_summary("done [1]", [("config", "runs/[a]/" + "x" * 60), ("accuracy", "0.5")], console=console)
    text = console.file.getvalue()
    assert "done [1]" in text
    assert "runs/[a]/" in text
    assert text.count("x") == 60  # folded, not cut
    assert re.search(r"accuracy\s*│\s*0.5", text)


def test_a_summary_table_has_a_row_each() -> None:
    table = summary_table([("a", "1"), ("b", "2")])
    assert table.row_count == 2
    assert len(table.columns) == 2


def test_the_bar_of_a_resumed_run_starts_where_it_was() -> None:
    console = terminal()
    with ProgressDisplay(60, completed=12, console=console) as progress:
        progress.message("resumed")
    assert "12/60" in printed(console) and "0/60" not in printed(console).replace("12/60", "")


def test_accuracies_of_sets_by_name_end_a_line() -> None:
    metrics = {
        "reward/score_mean": 0.5,
        "eval/math/accuracy": 0.25,
        "eval/code-2/accuracy": 1.0,
        "eval/math/score_mean": 9.0,
    }
    assert iteration_line(3, 8, metrics) == "iteration 3/8  score 0.5  math 0.25  code-2 1"
