"""Partial rollouts with environments in whole runs: beside HuggingFace models of each version, and synchronous runs."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.checkpoint.state import load_state
from hybridflow.checkpoint.store import step_name
from tests.environments.rollouts_worker import DYNAMIC, ONE, named
from tests.environments.test_rollouts import metrics, rollout, tensors
from tests.environments.tiny_chat import make_chat_inputs, run_config
from tests.environments.versions import checked_ages, log_probs_of, rollout_of
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

NUM_ITERATIONS, MOST_TURN, MOST_RESPONSE = 4, 24, 96
TALK = {"max_turn_tokens": MOST_TURN, "max_turns": 5}
LATE = {"arguments": {"delay": 0.02}, **TALK}
STALE = ["rollout.max_staleness=1", "rollout.partial={oversample: 1.5}"]
APART = ["actor.ranks=0", "rollout.ranks=1"]
COMMON = [f"num_iterations={NUM_ITERATIONS}", "checkpoint.save_interval=1", "checkpoint.keep_last=9", ONE]
COMMON += ["sampling.samples_per_prompt=2"]
RUNS = {
    "partial": [named("Talk", **TALK), *STALE],
    "synchronous": [named("Talk", **TALK), "algorithm.policy.importance={kind: token, cap: 2.0}"],
    "all-whole": [named("Talk", **TALK), STALE[0], "rollout.partial={oversample: 1.0}"],
    "long": [named("Talk", **TALK), *STALE, "sampling.stop_token_ids=[]"],
    "fragile": [named("Fragile", max_turn_tokens=40, call_seconds=3, num_workers=8), *STALE],
    "evaluated": [named("Talk", **LATE), *STALE, "metrics.eval_interval=1"],
    "dynamic": [named("Talk", **LATE), *STALE, DYNAMIC],
}
ON_TWO = {
    "tp-2": [named("Talk", **LATE), *STALE, "actor.tensor_parallel_size=2"],
    "dp-2": [named("Talk", **LATE), *STALE],
    "apart": [named("Talk", **LATE), *STALE, *APART, "rollout.tensor_parallel_size=1"],
}


@pytest.fixture(scope="module")
def root(cases: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("partial"))
    (root / "config.yaml").write_text(json.dumps(run_config(root, max_response_length=MOST_RESPONSE)))
    for num_ranks, runs in ((1, RUNS), (2, ON_TWO)):
        given = {name: [*COMMON, *overrides] for name, overrides in runs.items() if name in cases}
        if given:
            run_ranks(num_ranks, "tests.flows.one_step_off_worker", root / "config.yaml", json.dumps(given))
    return root


def each_run(*thorough: str) -> list[Any]:
    """That of the default set, and others."""
    both = [pytest.param("partial", marks=pytest.mark.cases("partial"))]
    return both + [pytest.param(name, marks=[pytest.mark.cases(name), pytest.mark.thorough]) for name in thorough]


@pytest.mark.parametrize("name", each_run("long", "evaluated", "dynamic", *ON_TWO))
def test_every_token_has_the_log_prob_of_the_version_that_chose_it(name: str, root: Path, tmp_path: Path) -> None:
    assert checked_ages(root / "runs" / name, NUM_ITERATIONS, tmp_path) >= {0, 1}


@pytest.mark.cases("partial")
def test_another_version_has_other_log_probs(root: Path, tmp_path: Path) -> None:
    batch, versions = rollout(root, "partial", 2), tensors(root, "partial", 2)["versions"][:, 0]
    old = batch.response_mask & (versions == 0)
    now = log_probs_of(root / "runs" / "partial", 1, batch, tmp_path)
    assert (batch.rollout_log_probs[old] - now[old]).abs().max() > 1e-2


def parts_of_turns(root: Path, name: str) -> list[list[tuple[int, int]]]:
    """Of each turn of the model (version, number of tokens) by segment."""
    found = []
    for iteration in range(1, NUM_ITERATIONS + 1):
        batch = rollout_of(root / "runs" / name, iteration)
        tokens = zip(batch.response_mask.tolist(), batch.versions[:, 0].tolist(), strict=True)
        for by_model, turn in itertools.groupby(tokens, key=lambda token: token[0]):
            if by_model:
                parts = itertools.groupby(version for _, version in turn)
                found.append([(version, len(list(part))) for version, part in parts])
    return found


@pytest.mark.cases("long")
def test_a_turn_that_a_stop_cuts_has_the_tokens_of_one_turn(root: Path) -> None:
    """The clock decides whether a turn is cut; tests/rollout/test_turns.py cuts one in any case."""
    turns = parts_of_turns(root, "long")
    assert all(first[0] < then[0] for turn in turns for first, then in itertools.pairwise(turn))
    assert max(sum(count for _, count in turn) for turn in turns) == MOST_TURN
    for iteration in range(1, NUM_ITERATIONS + 1):
        batch = rollout_of(root / "runs" / "long", iteration)
        counts = batch.lengths - batch.prompt_lengths
        assert counts.max() <= MOST_RESPONSE


@pytest.mark.cases("all-whole", "synchronous")
def test_where_every_group_must_be_whole_it_is_the_synchronous_run(root: Path) -> None:
    for iteration in range(1, NUM_ITERATIONS + 1):
        found, expected = (tensors(root, name, iteration) for name in ("all-whole", "synchronous"))
        for name in ("input_ids", "response_mask", "environment_rewards", "truncated"):
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("name", each_run(*ON_TWO))
def test_no_prompt_is_lost_and_none_is_trained_on_twice(name: str, root: Path) -> None:
    last = root / "runs" / name / "checkpoints" / step_name(NUM_ITERATIONS)
    left, questions = load_file(last / "under_way.safetensors")["groups"], list[str]()
    for iteration in range(1, NUM_ITERATIONS + 1):
        batch = rollout(root, name, iteration)
        prompts = zip(batch.input_ids.split(batch.lengths.tolist()), batch.prompt_lengths.tolist(), strict=True)
        questions += [str(ids[:count].tolist()) for ids, count in prompts][::2]
    drawn = load_state(last).state.num_prompts_drawn
    assert len(questions) == 4 * NUM_ITERATIONS and drawn == len(questions) + len(left)
    assert len(set(questions)) >= 16 - len(left), "the file has 16 prompts, in their order"


@pytest.mark.thorough
@pytest.mark.cases("fragile")
def test_a_row_whose_environment_fails_stays_in_its_group(root: Path) -> None:
    """Of the questions 1 to 5 each fails in another way; others give 1."""
    seen = set[int]()
    for iteration in range(1, NUM_ITERATIONS + 1):
        batch = rollout(root, "fragile", iteration)
        assert torch.equal(batch.prompt_indices, torch.arange(4).repeat_interleave(2))
        for row, rewards in enumerate(batch.environment_rewards[:, 0].tolist()):
            mask = batch.response_mask.split(batch.lengths.tolist())[row]
            assert mask.any() == (rewards == rewards), "none of its tokens is trained on"
            seen |= {row} if rewards != rewards else set()
    assert seen


@pytest.mark.thorough
@pytest.mark.cases("evaluated")
def test_evaluations_between_leave_the_rows_under_way_alone(root: Path) -> None:
    rows = metrics(root, "evaluated")[1:]  # behind the evaluation before training
    assert [float(row["rollout/groups_under_way"]) for row in rows] == [2.0] * NUM_ITERATIONS
    assert all(float(row["environment/failed_rows"]) == 0 for row in rows)
    assert all(float(row["eval/score_mean"]) > 0 for row in rows)
    assert all(float(row["rollout/tokens_under_way"]) > 0 for row in rows)


@pytest.mark.thorough
def test_a_run_that_is_killed_begins_open_rows_again(root: Path, tmp_path: Path) -> None:
    overrides = [*COMMON, *RUNS["partial"], "name=killed", "checkpoint.load=auto"]
    command = (1, "tests.checkpoint.killed_worker", "0", "hybridflow.rollout.partial:UnderWay.add", "3", "0")
    assert run_ranks(*command, root / "config.yaml", *overrides, check=False).returncode != 0
    done = run_ranks(1, "hybridflow.train", root / "config.yaml", *overrides)
    [number] = re.findall(r"rollout.partial: (\d+) rows had not ended when the run was interrupted", done.stdout)
    state = load_file(root / "runs" / "killed" / "checkpoints" / step_name(2) / "under_way.safetensors")
    running = state["rows"][:, 2] == 0
    assert int(number) == int(running.sum()) > 0 and not state["rows"][running][:, 0].any()
    assert checked_ages(root / "runs" / "killed", NUM_ITERATIONS, tmp_path) >= {0, 1}
    assert [float(row["rollout/groups_under_way"]) for row in metrics(root, "killed")] == [2.0] * NUM_ITERATIONS
