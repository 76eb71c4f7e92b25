"""Traces of a profiler: what is traced, under which names, and that nothing is where nobody asks."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import ExperimentConfig
from hybridflow.config.metrics import ProfileConfig
from hybridflow.errors import ConfigError, RecordError
from hybridflow.parallel import device
from hybridflow.parallel.device import named_range
from hybridflow.placement.placed import place
from hybridflow.recording.measure import Stopwatch
from hybridflow.recording.traces import stage_traces, untraced
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks


def ranges(file: Path) -> list[str]:
    """The names of a trace's ranges, in the order in which they begin. It has nothing else that is written with B."""
    events = json.loads(file.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation" and event["ph"] == "X"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def test_a_stage_has_a_trace_with_phases_and_work(tmp_path: Path) -> None:
    trace, watch = stage_traces(ProfileConfig(iterations=(3,), ranks=(1,)), tmp_path, 1), Stopwatch()
    for iteration in (2, 3):
        for stage in ("rollout", "update"):
            with trace(iteration, stage), watch.stage(stage):
                for phase in ("a", "b"):
                    with watch.phase(phase):
                        torch.ones(3) + 1
    files = sorted((tmp_path / "traces").iterdir())
    assert [file.name for file in files] == [
        "iteration_000003_rollout_rank_1.json",
        "iteration_000003_update_rank_1.json",
    ]
    assert ranges(files[0]) == ["rollout", "a", "b"] and ranges(files[1]) == ["update", "a", "b"]
    events = json.loads(files[0].read_text())["traceEvents"]
    assert sum(event["name"] == "aten::add" for event in events) == 2
    assert not any(event.get("cat") == "python_function" for event in events)


def test_calls_of_python_are_there_when_they_are_asked_for(tmp_path: Path) -> None:
    with stage_traces(ProfileConfig(iterations=(1,), python=True), tmp_path, 0)(1, "update"):
        json.dumps({})
    (file,) = (tmp_path / "traces").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    assert any(e.get("cat") == "python_function" and "dumps" in e["name"] for e in events)


def test_a_stage_that_ends_early_is_written_with_what_there_was(tmp_path: Path) -> None:
    trace = stage_traces(ProfileConfig(iterations=(1,)), tmp_path, 0)
    with pytest.raises(ZeroDivisionError), trace(1, "update"):
        raise ZeroDivisionError
    assert not (tmp_path / "traces").exists()
    with trace(1, "update"):  # torch's profiler has ended
        pass
    assert len(list((tmp_path / "traces").iterdir())) == 1


def test_a_trace_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("a file")
    with (
        pytest.raises(RecordError, match=r"traces.*iteration_000001_update_rank_0|traces"),
        stage_traces(ProfileConfig(iterations=(1,)), tmp_path, 0)(1, "update"),
    ):
        pass


@pytest.mark.parametrize("config", [None, ProfileConfig(iterations=(1,), ranks=(2, 5))])
def test_nothing_happens_where_nobody_asks(config: ProfileConfig | None, tmp_path: Path) -> None:
    trace = stage_traces(config, tmp_path, 0)
    assert trace is untraced and isinstance(trace(1, "update"), nullcontext)
    assert isinstance(named_range("update"), nullcontext)


def test_ranges_of_nsight_stand_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(device, "uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", heard.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: heard.append("pop"))
    with Stopwatch().phase("log_probs"), named_range("micro-batch 0 forward"):
        pass
    assert heard == ["log_probs", "micro-batch 0 forward", "pop", "pop"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("traced")
    return write_config(root / "config.yaml", make_inputs(root / "inputs"))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"iterations": [1, 3]}, "metrics.profile.iterations has 3: the run has 2 iterations"),
        ({"iterations": []}, "metrics.profile.iterations"),
        ({"iterations": [0]}, "metrics.profile.iterations.0"),
        ({"iterations": [1], "ranks": [-1]}, "metrics.profile.ranks.0"),
        ({"iterations": [1], "rank": [0]}, "metrics.profile.rank"),
        ({}, "metrics.profile.iterations"),
    ],
)
def test_what_a_run_does_not_have_is_refused_at_load(config: Path, change: dict, rule: str) -> None:
    with pytest.raises(ConfigError) as error:
        ExperimentConfig.from_yaml(config, [f"metrics.profile={json.dumps(change)}"])
    assert rule in str(error.value)


def test_a_rank_that_a_run_does_not_have_is_refused(config: Path) -> None:
    found = ExperimentConfig.from_yaml(config, ["metrics.profile={iterations: [2], ranks: [1, 2]}"])
    with pytest.raises(ConfigError, match=r"metrics\.profile\.ranks has 2: the run has the ranks 0 to 1"):
        place(found, 2)
    within = ExperimentConfig.from_yaml(config, ["metrics.profile={iterations: [2], ranks: [0, 1]}"])
    assert place(within, 2).world_size == 2


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_run_writes_the_traces_and_computes_the_same(config: Path) -> None:
    change = "metrics.profile={iterations: [2], ranks: [1]}"
    for name, more in (("plain", ()), ("traced", (change,))):
        run_ranks(2, "hybridflow.train", config, f"name={name}", *more)
    plain, traced = (config.parent / name for name in ("plain", "traced"))
    assert not (plain / "traces").exists()
    found = {file.name: ranges(file) for file in (traced / "traces").iterdir()}
    rollout, estimate, update = (
        [name for name in found[f"iteration_000002_{stage}_rank_1.json"] if not name.startswith("gloo")]
        for stage in ("rollout", "estimate", "update")
    )
    assert len(found) == 3 and rollout[0] == "rollout" and "generate" in rollout
    assert estimate[0] == "estimate" and {"reward", "reference", "values", "micro-batch 0 forward"} <= set(estimate)
    assert update[0] == "update" and {"critic_update", "actor_update", "micro-batch 0 loss"} <= set(update)
    told = [(directory / "metrics.csv").read_text().splitlines() for directory in (plain, traced)]
    columns = told[0][0].split(",")
    kept = [
        i for i, name in enumerate(columns) if name.startswith(("actor/", "critic/loss", "reward/score", "rollout/log"))
    ]
    rows = [[[line.split(",")[i] for i in kept] for line in lines] for lines in told]
    assert rows[0] == rows[1] and len(rows[0]) == 3 and len(kept) > 12
