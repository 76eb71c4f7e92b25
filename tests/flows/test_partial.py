"""Partial rollouts in whole runs: against HuggingFace models of each version, and themselves."""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridflow.checkpoint.state import load_state
from hybridflow.checkpoint.store import step_name
from hybridflow.cli.convert import main as convert
from tests.checkpoint.kills import rows
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.flows.test_one_step_off import GRPO, batch, log_probs_of
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

NUM_ITERATIONS = 5
ENDS = "sampling.stop_token_ids=" + json.dumps(list(range(10, 25)))
COMMON = [
    *(f"num_iterations={NUM_ITERATIONS}", "critic=null", "sampling.samples_per_prompt=2", ENDS),
    *("metrics.dump_batches=true", "checkpoint.save_interval=1", "checkpoint.keep_last=9"),
    *("algorithm=" + json.dumps(GRPO), "sampling.max_response_length=16"),
    *("rollout.max_staleness=1", "rollout.partial={oversample: 1.5}"),
]
TP1 = "rollout.tensor_parallel_size=1"
RUNS = {
    "partial": [TP1],
    "again": [TP1],
    "tp2": [],
    "older": [TP1, "rollout.max_staleness=2", "rollout.partial.oversample=2.5"],
    "dynamic": [
        *(TP1, "rollout.partial.oversample=2", "reference=null"),
        "reward=" + json.dumps({"functions": [{"function": "tests.flows.dynamic_rewards:first_is_a_digit"}]}),
        "algorithm=" + json.dumps(GRPO | {"kl": {"use": "none"}, "dynamic_sampling": {"max_generation_rounds": 2}}),
    ],
    "apart": ["actor.ranks=0", "actor.tensor_parallel_size=1", "reference.ranks=0", "rollout.ranks=1"],
    "ppo": [
        "critic={model: CRITIC, dtype: float32, optimizer: {lr: 1.0e-3}}",
        "algorithm={name: ppo, update: {mini_batch_size: 4}}",
        TP1,
    ],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("partial")
    config = write_config(root / "config.yaml", make_inputs(root / "inputs"))
    critic = str(root / "inputs" / "critic")
    runs = {name: [*COMMON, *(x.replace("CRITIC", critic) for x in more)] for name, more in RUNS.items()}
    run_ranks(2, "tests.flows.one_step_off_worker", config, json.dumps(runs))
    return root


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("ppo", "dynamic")])
def test_every_segment_has_the_log_probs_of_the_version_that_chose_it(name: str, root: Path, tmp_path: Path) -> None:
    run, seen = root / name, set[int]()
    models = {0: AutoModelForCausalLM.from_pretrained(root / "inputs" / "policy", dtype=torch.float32)}
    for version in range(1, NUM_ITERATIONS):
        directory = tmp_path / str(version)
        convert(["megatron-to-hf", str(run / "checkpoints" / step_name(version) / "actor"), str(directory)])
        models[version] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for iteration in range(1, NUM_ITERATIONS + 1):
        found = batch(run, iteration)
        versions, mask = found["versions"][:, 0], found["response_mask"]
        seen |= {iteration - 1 - version for version in versions[mask].unique().tolist()}
        for version in versions[mask].unique().tolist():
            expected, of_version = log_probs_of(models[version], found), mask & (versions == version)
            torch.testing.assert_close(found["rollout_log_probs"][of_version], expected[of_version], rtol=0, atol=1e-4)
    assert seen == ({0, 1, 2} if name == "older" else {0, 1})


def test_what_it_trains_on_depends_on_the_seed_alone(root: Path) -> None:
    assert len(rows(root / "partial")) == NUM_ITERATIONS
    assert rows(root / "again") == rows(root / "partial")
    for name in ("partial", "ppo"):
        under_way = [float(row["rollout/groups_under_way"]) for row in rows(root / name)]
        assert under_way == [2.0] * NUM_ITERATIONS, "1.5 times four prompts, of which four are trained on"


def test_no_prompt_is_lost_and_none_is_trained_on_twice(root: Path) -> None:
    """Prompts come in the order of the file, and each iteration trains on four that are whole."""
    for name in ("partial", "older"):
        left = load_file(root / name / "checkpoints" / step_name(NUM_ITERATIONS) / "under_way.safetensors")
        texts = [prompts(batch(root / name, iteration)) for iteration in range(1, NUM_ITERATIONS + 1)]
        assert [len(some) for some in texts] == [8] * NUM_ITERATIONS  # two rows a prompt
        drawn = 4 * NUM_ITERATIONS + len(left["groups"])
        assert load_state(root / name / "checkpoints" / step_name(NUM_ITERATIONS)).state.num_prompts_drawn == drawn
        positions = left["groups"][:, 1].tolist()
        assert positions == sorted(set(positions)) and positions[-1] < drawn


def test_dynamic_sampling_trains_on_as_many_groups_as_are_asked_for(root: Path) -> None:
    """Though the first draw is of twice as many, and each iteration draws as many as end."""
    for iteration in range(1, NUM_ITERATIONS + 1):
        assert len(batch(root / "dynamic", iteration)["prompt_indices"].unique()) == 4


def test_speed_counts_what_was_generated(root: Path) -> None:
    """Tokens of the batch and those under way, less those that were under way before."""
    before = 0.0
    with (root / "partial" / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    for iteration, row in enumerate(found, 1):
        trained = float(batch(root / "partial", iteration)["response_mask"].sum())
        under_way, seconds = (float(row[name]) for name in ("rollout/tokens_under_way", "time/generate_seconds"))
        speed = float(row["rollout/throughput_tokens_per_sec"])
        assert speed == pytest.approx((trained + under_way - before) / seconds)
        before = under_way


def prompts(found: dict[str, torch.Tensor]) -> list[list[int]]:
    parts = found["input_ids"].split(found["lengths"].tolist())
    return [ids[:count].tolist() for ids, count in zip(parts, found["prompt_lengths"].tolist(), strict=True)]
