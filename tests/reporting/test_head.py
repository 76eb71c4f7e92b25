"""What stands before the curves: state, duration, scores, and what the run was made of."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.parallel.peer_processes import this_process
from hybridflow.reporting.head import best_of, head, scored_metrics, span, state
from hybridflow.reporting.runs import RunRecord, read_runs
from tests.reporting.run_dirs import BEGAN, HOSTILE, STARTED, make_run, write_start


def read(path: Path) -> RunRecord:
    [run] = read_runs([path], sampled_iterations=9)
    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def with_config(run: RunRecord, **values: object) -> RunRecord:
    return replace(run, config={key.replace("__", "."): json.dumps(value) for key, value in values.items()})


def test_the_facts_of_a_run(path: Path) -> None:
    found = head(read(path))
    assert found["state"] == {"kind": "finished", "text": "iteration 6"}
    assert found["facts"] == [
        ["model", [HOSTILE]],
        ["duration", ["1 h 2 min", "from 2026-05-28 20:26 to 21:28 UTC"]],
        ["command", ["hybridflow train my.yaml name='a b'"]],
        ["versions", ["hybridflow 0.1.0, torch 2.13.0+cpu, commit 0123456789ab"]],
    ]


@pytest.mark.parametrize(
    ("how", "why", "kind", "text"),
    [
        ("finished", "", "finished", "iteration 6 of 1,000"),
        ("stopped", "after iteration 6 (SIGTERM)", "stopped", "after iteration 6 (SIGTERM); iteration 6 of 1,000 is"),
        ("failed", "NonFiniteError: loss", "failed", "after iteration 6 of 1,000: NonFiniteError: loss"),
        ("lost", "", "failed", "after iteration 6 of 1,000: the process has ended without saying why"),
    ],
)
def test_how_a_run_has_ended(path: Path, how: str, why: str, kind: str, text: str) -> None:
    write_start(path, how=how, why=why)
    found = state(with_config(read(path), num_iterations=1000))
    assert found[0] == kind and found[1].startswith(text)


def test_a_run_without_an_end(path: Path) -> None:
    """Elsewhere nothing is known; here the process runs, or does not; a hang report says that it has ended."""
    write_start(path, how=None)
    os.utime(path / "metrics.csv", (BEGAN + 90, BEGAN + 90))
    run = replace(read(path), read_at=BEGAN + 150)
    kind, text = state(run)
    assert (kind, text.partition("; ")[0]) == ("unknown", "iteration 6 was written 1 min 0 s before this page")
    assert head(run)["facts"][1] == ["duration", ["1 min 30 s", "from 2026-05-28 20:26 UTC"]]
    own = this_process(0)
    for start_time, expected, seconds in ((own.start_time, "running", "2 min 30 s"), (1, "failed", "1 min 30 s")):
        started = STARTED | {"process": [own.machine, own.pid, start_time]}
        (path / "starts.jsonl").write_text(json.dumps(started) + "\n")
        run = replace(read(path), read_at=BEGAN + 150)
        assert state(run)[0] == expected and head(run)["facts"][1][1][0] == seconds
    (path / "logs").mkdir()
    (path / "logs" / "hang_report.txt").write_text("rank 1 is stuck")
    run = read(path)
    assert state(replace(run, is_running=True)) == (
        "failed",
        "after iteration 6: logs/hang_report.txt says which rank was stuck or gone",
    )
    os.utime(path / "logs" / "hang_report.txt", (BEGAN - 5, BEGAN - 5))  # of an earlier start
    assert not read(path).has_hang_report


def test_a_run_that_has_recorded_no_start(path: Path) -> None:
    (path / "starts.jsonl").unlink()
    run = read(path)
    assert state(run) == ("unknown", "iteration 6; the run has not recorded its start and end")
    assert [name for name, _ in head(run)["facts"]] == ["model"]


def test_the_duration_is_that_of_all_starts(path: Path) -> None:
    first = read(path).starts[0]
    second = replace(first, began=BEGAN + 100_000, ended=BEGAN + 100_060, command="torchrun ... x.py")
    facts = dict(head(replace(read(path), starts=(first, second)))["facts"])
    assert facts["duration"] == ["1 h 3 min in 2 starts", "from 2026-05-28 20:26 to 2026-05-30 00:14 UTC"]
    assert facts["command"] == ["hybridflow train my.yaml name='a b'", "torchrun ... x.py"]
    assert [span(seconds) for seconds in (0.4, 59.6, 3600, 90_000)] == ["0 s", "1 min 0 s", "1 h 0 min", "1 d 1 h"]


def test_first_best_and_last_score(path: Path) -> None:
    run = read(path)
    curves = {
        "eval/accuracy": [(0, 0.25), (3, 0.75), (6, 0.5)],
        "reward/score_mean": [(1, math.nan), (2, -1.5), (3, 2.0), (4, 2.0)],
        "eval/loss": [(0, 2.0), (3, 0.5), (6, 1.0)],
        "kl/sequence_mean": [(1, 3.0), (2, 1.0)],
    }
    run = with_config(replace(run, curves=curves), checkpoint__best_metric="kl/sequence_mean")
    assert scored_metrics(run) == ["eval/accuracy", "eval/loss", "kl/sequence_mean"]
    accuracy, loss, kl = head(run)["scores"]
    assert accuracy == {
        "metric": "eval/accuracy",
        "title": "Held-out prompts answered right",
        "first": "25.0%",
        "best": "75.0%",
        "best_at": 3,
        "last": "50.0%",
    }
    assert (loss["first"], loss["best"], loss["best_at"], loss["last"]) == ("2", "0.5", 3, "1")
    assert (kl["best"], kl["best_at"]) == ("1 nats", 2)
    highest = with_config(run, checkpoint__best_metric="kl/sequence_mean", checkpoint__best_is="highest")
    assert head(highest)["scores"][2]["best_at"] == 1
    del curves["eval/loss"], curves["kl/sequence_mean"]
    score = head(run)["scores"][1]
    assert (score["first"], score["best"], score["best_at"], score["last"]) == ("not finite", "2", 3, "2")
    assert best_of([(1, math.inf)], lowest=True) is None


def test_model_and_data_in_all_forms(path: Path) -> None:
    (path / "config.yaml").write_text(
        "algorithm: {name: custom, flow: 'mine:flow'}\n"
        "actor: {model: Qwen/Qwen2.5-0.5B}\n"
        "reward: {models: [{model: rm}], functions: [{function: 'mine:rule'}, {function: 'mine:rule'}]}\n"
        "data:\n"
        "  train: [{path: a.jsonl, weight: 2.0}, {hub: openai/gsm8k, split: train, weight: 1.0}]\n"
        "  heldout: {hub: openai/gsm8k, split: test}\n"
    )
    facts = dict(head(read(path))["facts"])
    assert facts["algorithm"] == ["custom: mine:flow"]
    assert facts["model"] == ["Qwen/Qwen2.5-0.5B"]
    assert facts["reward"] == ["rm", "mine:rule"]
    assert facts["data"] == ["a.jsonl", "openai/gsm8k, train", "held out: openai/gsm8k, test"]
    (path / "config.yaml").write_text("algorithm: {name: dr_grpo}\ndata: {train: x.parquet, heldout: null}\n")
    facts = dict(head(read(path))["facts"])
    assert (facts["algorithm"], facts["data"]) == (["Dr. GRPO"], ["x.parquet"])


def test_sets_by_name_are_data_and_scores(path: Path) -> None:
    (path / "config.yaml").write_text(
        "algorithm: {name: grpo}\n"
        "data:\n"
        "  train: a.jsonl\n"
        "  heldout: {math: {files: m.jsonl, samples: 4}, code-2: {files: {hub: openai/gsm8k, split: test}}}\n"
    )
    run = read(path)
    assert dict(head(run)["facts"])["data"] == [
        "a.jsonl",
        "held out, math: m.jsonl",
        "held out, code-2: openai/gsm8k, test",
    ]
    curve = ((0, 0.25), (2, 0.5))
    named = replace(
        run, curves={"eval/math/accuracy": curve, "eval/math/score_mean": curve, "reward/score_mean": curve}
    )
    assert scored_metrics(named) == ["eval/math/accuracy", "reward/score_mean"]
    assert head(named)["scores"][0] | {"best_at": 2} == head(named)["scores"][0]
    assert (head(named)["scores"][0]["title"], head(named)["scores"][0]["last"]) == (
        "Responses to math that are right (avg@k)",
        "50.0%",
    )
