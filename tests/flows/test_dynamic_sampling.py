"""Dynamic sampling: which groups an iteration trains on, what is kept for the next, and that a run goes on with it."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridflow.algorithm_config import DynamicSampling
from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.checkpoint.state import RunState, SavedRun, load_state, write_state
from hybridflow.config import ExperimentConfig
from hybridflow.errors import ConfigError
from hybridflow.flows.dynamic_sampling import sampled
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

SAMPLES = 2


class Known:
    def __init__(self, raw_scores: Tensor) -> None:
        self.raw_scores = raw_scores


class Run:
    """What `sampled` uses of a Run: prompts 0, 1, 2, ... of which `scores` says the scores, a pair each."""

    def __init__(self, scores: dict[int, tuple[float, float]], count: int, state: RunState | None = None) -> None:
        self._scores, self._count = scores, count
        self.state, self.metrics, self.lines = state or RunState(), dict[str, Tensor](), list[str]()
        self.samples_per_prompt, self.iteration = SAMPLES, 1
        self.draw()

    def draw(self) -> None:
        first = self.state.num_prompts_drawn
        self.prompt_rows = tuple(range(first, first + self._count))
        self.state = replace(self.state, num_prompts_drawn=first + self._count)

    @property
    def prompts(self) -> tuple[int, ...]:
        return self.prompt_rows

    def generate(self) -> RolloutBatch:
        """The first token of each row is its prompt, the second the number of its sample."""
        rows = [(prompt, sample) for prompt in self.prompt_rows for sample in range(SAMPLES)]
        lengths = torch.full((len(rows),), 2)
        prompt_lengths = torch.ones_like(lengths)
        mask = response_mask(lengths, prompt_lengths)
        indices = torch.arange(self._count).repeat_interleave(SAMPLES)
        ids = torch.tensor(rows).flatten()
        return RolloutBatch(
            ids, lengths, prompt_lengths, indices, torch.zeros(len(rows), dtype=torch.bool), mask, -ids.float()
        )

    def scores(self, rollout: RolloutBatch) -> Tensor:
        return torch.tensor([self._scores[prompt] for prompt in self.prompt_rows]).flatten()

    def whole(self, raw_scores: Tensor) -> Known:
        return Known(raw_scores)

    def take(self, prompt_rows: tuple[int, ...], rollout: RolloutBatch) -> None:
        self.prompt_rows, self.rollout = prompt_rows, rollout

    def say(self, line: str) -> None:
        self.lines.append(line)


LIVE, DEAD = (0.0, 1.0), (1.0, 1.0)


def counts(run: Run) -> dict[str, float]:
    return {name.removeprefix("rollout/"): float(value) for name, value in run.metrics.items()}


def test_groups_of_equal_scores_are_replaced_by_later_ones() -> None:
    run = Run({0: LIVE, 1: DEAD, 2: DEAD, 3: LIVE, 4: LIVE, 5: (2.0, 1.0)}, count=3)
    rollout, scores = sampled(run, DynamicSampling())
    assert run.prompt_rows == (0, 3, 4) and run.state.num_prompts_drawn == 6
    assert rollout.input_ids.tolist() == [0, 0, 0, 1, 3, 0, 3, 1, 4, 0, 4, 1]
    assert rollout.prompt_indices.tolist() == [0, 0, 1, 1, 2, 2]
    assert rollout.rollout_log_probs.tolist() == [-x for x in rollout.input_ids.tolist()]
    assert scores.tolist() == [0, 1, 0, 1, 0, 1]
    assert counts(run) == {
        "generation_rounds": 2,
        "groups_generated": 6,
        "groups_equal": 2,
        "groups_filled": 0,
        "groups_surplus": 1,
    }
    assert run.lines == [
        "iteration 1: 6 groups generated in 2 rounds, 2 of them with equal scores; 0 from before, 1 kept for the next"
    ]
    run.iteration = 2
    run.draw()
    run._scores |= {6: DEAD, 7: LIVE, 8: LIVE}
    rollout, scores = sampled(run, DynamicSampling())
    assert run.prompt_rows == (5, 7, 8) and scores.tolist() == [2, 1, 0, 1, 0, 1]
    assert run.state.surplus is None and counts(run)["generation_rounds"] == 1


def test_a_surplus_may_be_dropped() -> None:
    run = Run({0: LIVE, 1: DEAD, 2: LIVE, 3: LIVE}, count=2)
    sampled(run, DynamicSampling(surplus="drop"))
    assert run.prompt_rows == (0, 2) and run.state.surplus is None
    assert "1 dropped" in run.lines[0]


def test_rounds_are_bounded_and_what_is_missing_is_filled_up() -> None:
    run = Run({0: DEAD, 1: DEAD, 2: LIVE, 3: DEAD, 4: LIVE, 5: LIVE}, count=2)
    rollout, scores = sampled(run, DynamicSampling(max_generation_rounds=2))
    assert run.prompt_rows == (2, 0) and scores.tolist() == [0, 1, 1, 1]
    assert rollout.prompt_indices.tolist() == [0, 0, 1, 1]
    assert counts(run)["groups_filled"] == 1 and counts(run)["generation_rounds"] == 2
    assert run.lines[0].endswith("; 1 of equal scores fill the batch (max_generation_rounds)")


def test_with_nothing_to_learn_from_the_first_round_is_the_batch() -> None:
    run = Run({i: DEAD for i in range(6)}, count=2)
    _, scores = sampled(run, DynamicSampling(max_generation_rounds=3))
    assert run.prompt_rows == (0, 1) and scores.tolist() == [1, 1, 1, 1] and run.state.num_prompts_drawn == 6


def test_a_surplus_of_another_group_size_is_left_out() -> None:
    run = Run({0: LIVE, 1: LIVE, 2: LIVE, 3: DEAD}, count=2)
    run._scores[1] = DEAD
    sampled(run, DynamicSampling())
    run = Run({i: LIVE for i in range(8)}, count=2, state=run.state)
    run.samples_per_prompt = 3
    run.state = replace(run.state, num_prompts_drawn=4)
    run.draw()
    sampled(run, DynamicSampling())
    assert run.prompt_rows == (4, 5)


def test_no_prompt_is_left_out_where_the_surplus_fills_a_batch() -> None:
    """As on a resume with fewer prompts an iteration."""
    run = Run({0: DEAD, 1: LIVE, 2: LIVE, 3: LIVE, 4: LIVE, 5: LIVE, 6: LIVE, 7: DEAD}, count=3)
    sampled(run, DynamicSampling())
    assert run.prompt_rows == (1, 2, 3) and run.state.surplus is not None and run.state.surplus.prompts == (4, 5)
    smaller = Run(run._scores, count=2, state=run.state)
    sampled(smaller, DynamicSampling())
    assert smaller.prompt_rows == (4, 5) and smaller.state.num_prompts_drawn == 8
    assert smaller.state.surplus is not None and smaller.state.surplus.prompts == (6,)


def test_a_surplus_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    run = Run({0: DEAD, 1: LIVE, 2: LIVE, 3: LIVE}, count=2)
    sampled(run, DynamicSampling())
    assert run.state.surplus is not None and run.state.surplus.prompts == (3,)
    write_state(tmp_path, SavedRun(run.state, {}, {}, {}, None))
    loaded = load_state(tmp_path).state
    assert loaded.surplus is not None and loaded.surplus.prompts == (3,)
    assert loaded.surplus.tensors.keys() == run.state.surplus.tensors.keys()
    for name, tensor in run.state.surplus.tensors.items():
        assert torch.equal(loaded.surplus.tensors[name], tensor) and loaded.surplus.tensors[name].dtype == tensor.dtype
    assert replace(loaded, surplus=None) == replace(run.state, surplus=None)


# ------------------------------------------------------------------------------------------------ whole runs


def config(directory: Path, **algorithm: Any) -> Path:
    path = write_config(directory / "config.yaml", make_inputs(directory / "inputs"))
    tree = json.loads(path.read_text())
    for name in ("critic", "reference"):
        del tree[name]
    tree["reward"] = {
        "functions": [{"function": "tests.flows.dynamic_rewards:first_is_a_digit"}],
        "overlong": {"buffer": 2},
    }
    tree["sampling"]["samples_per_prompt"] = 2
    tree["algorithm"] = {
        "name": "grpo",
        "kl": {"use": "none"},
        "dynamic_sampling": {"max_generation_rounds": 3},
    } | algorithm
    tree["algorithm"]["policy"] = {"loss_mean": "token_mean", "mask_truncated": True, "clip_range_high": 0.28}
    tree["num_iterations"] = 4
    tree["metrics"]["dump_batches"] = True
    path.write_text(json.dumps(tree))
    return path


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    timed = re.compile("time/|_ms$|tokens_per_sec|throughput|memory/|idle|seconds")
    return [{name: value for name, value in row.items() if not timed.search(name)} for row in found]


@pytest.mark.distributed
def test_a_run_goes_on_with_its_surplus_bit_for_bit(tmp_path: Path) -> None:
    path = config(tmp_path)
    said = run_ranks(
        2, "hybridflow.train", path, "name=whole", "checkpoint.save_interval=1", "checkpoint.keep_last=9"
    ).stdout
    whole = rows(tmp_path / "whole")
    surplus = [int(float(row["rollout/groups_surplus"])) for row in whole]
    assert any(surplus[:-1]), "the test needs an iteration that leaves some"
    assert all(float(row["rollout/groups_equal"]) >= 0 for row in whole) and "groups generated in" in said
    stop = next(i for i, count in enumerate(surplus) if count) + 1
    run_ranks(2, "hybridflow.train", path, "name=cut", "checkpoint.save_interval=1", f"num_iterations={stop}")
    assert (tmp_path / "cut" / "checkpoints" / f"step_{stop:06d}" / "surplus.safetensors").exists()
    run_ranks(2, "hybridflow.train", path, "name=cut", "checkpoint.save_interval=1")
    assert rows(tmp_path / "cut") == whole
    last = "iteration_000004.safetensors"
    one, other = (load_file(tmp_path / name / "batches" / last) for name in ("whole", "cut"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"checkpoint": {"save_rollout": True}}, "checkpoint.save_rollout = true: with algorithm.dynamic_sampling"),
        ({"algorithm": {"name": "opo", "policy": {}}}, "dynamic_sampling.surplus = keep: opo is exactly on-policy"),
    ],
)
def test_what_cannot_go_together_is_refused(changes: dict[str, dict[str, Any]], told: str, tmp_path: Path) -> None:
    tree = json.loads(config(tmp_path).read_text())
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    (tmp_path / "x.yaml").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=re.escape(told)):
        ExperimentConfig.from_yaml(tmp_path / "x.yaml")
