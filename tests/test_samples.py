"""What `python -m hybridflow.samples` shows of a samples.jsonl."""

import json
from pathlib import Path

import pytest

from hybridflow.cli.samples import ShownSample, choose_samples, main, read_samples
from hybridflow.recording.writers import SampleWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two iterations, of three and of six responses, as a run writes them."""
    writer = SampleWriter(tmp_path / "samples.jsonl")
    for iteration, scores in ((1, [0.0, 1.0, 0.5]), (2, [0.25, 1.0, -1.0, 0.5, 1.0, 0.75])):
        writer.write(
            iteration,
            [
                {
                    "kind": "train",
                    "prompt": f"{iteration}+{i}=",
                    "response": f"answer {i}",
                    "score": score,
                    "parts": {"exact": score},
                    "columns": {"answer": f"{iteration + i}"},
                }
                for i, score in enumerate(scores)
            ],
        )
    heldout = {"kind": "heldout", "prompt": "9+9=", "response": "held", "score": 1.0, "parts": {}, "columns": {}}
    writer.write(2, [heldout, heldout | {"prompt": "8+8="}])
    writer.close()
    return tmp_path


def test_the_last_iteration_is_shown_best_worst_and_others(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(run), "--number", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}: iteration 2, 6 responses written, mean score of these 6: 0.4167; 2 to held-out prompts"
    kinds = [line.split("╭─ ")[1].split(" ─")[0] for line in lines if "╭─ " in line]
    assert kinds[:2] == ["best of 6: score 1", "worst of 6: score -1"] and kinds[2].startswith("random of 6: score ")
    assert kinds[3:] == ["held-out, greedy: score 1"]
    assert [line.strip("│ ") for line in lines[2:5]] == ["2+1=", "answer 1", "answer: '3'"]
    assert lines[5].startswith("╰─ exact 1 ─")


def test_an_iteration_by_its_number(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(run / "samples.jsonl"), "--iteration", "1"]) == 0
    out = capsys.readouterr().out
    assert "iteration 1, 3 responses" in out and [out.count(f"answer {i} ") for i in range(3)] == [1, 1, 1]
    assert main([str(run), "--iteration", "7"]) == 1
    assert "--iteration 7: has none; there are iterations 1 to 2" in capsys.readouterr().err


def test_a_response_that_was_cut_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"iteration": 1, "prompt": "p", "response": text, "score": 0.0} for text in ("23 + 45 is", "68")]
    rows[0]["truncated"] = True
    (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "23 + 45 is [cut here by a limit]" in shown and shown.count("cut here") == 1


def sample(score: float | None) -> ShownSample:
    return ShownSample(1, "p", "r", score, {})


def test_each_is_shown_once_and_ties_come_in_the_order_of_the_file() -> None:
    samples = [sample(score) for score in (1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5)]
    found = [(kind, next(i for i, x in enumerate(samples) if x is one)) for kind, one in choose_samples(samples, 2, 3)]
    assert found[:4] == [("best", 0), ("best", 2), ("worst", 1), ("worst", 3)]
    others = {
        tuple(i for i, x in enumerate(samples) if any(x is y for _, y in choose_samples(samples, 2, s)[4:]))
        for s in range(9)
    }
    assert len(others) > 1 and all(len(pair) == 2 and min(pair) >= 4 for pair in others)
    assert choose_samples(samples, 2, 3)[4:] == choose_samples(samples, 2, 3)[4:]
    # of three or four no more than one is called the best
    assert [kind for kind, _ in choose_samples(samples[:3], 2, 0)] == ["best", "worst", "random"]
    assert [kind for kind, _ in choose_samples([sample(None)] * 3, 2, 0)] == ["random", "random"]


def test_escapes_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    line = {"iteration": 1, "prompt": "p", "response": "\x1b[2Jred [bold]x[/bold]", "score": None}
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + '\n{"iterat')
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b[2Jred [bold]x[/bold]" in out and "random of 1: no score" in out
    assert len(read_samples(tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "samples.jsonl: cannot be read: No such file"),
        ("", "holds no samples; metrics.num_samples says"),
        ("{}\n", "samples.jsonl: line 1: is no sample of a run"),
        ("[1\n", "samples.jsonl: line 1: is not JSON"),
    ],
)
def test_what_is_no_record_of_a_run_is_told(tmp_path: Path, capsys, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "samples.jsonl").write_text(text)
    assert main([str(tmp_path)]) == 1
    assert expected in capsys.readouterr().err
