"""One-step-off rollouts in whole runs: against the synchronous run, a HuggingFace model, and themselves. Runs that end
early: tests/checkpoint/kills.py.
"""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridflow.checkpoint.store import step_name
from hybridflow.cli.convert import main as convert
from tests.checkpoint.kills import rows
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

NUM_ITERATIONS, LONGER = 5, 48
WEIGHTS = {"policy": {"importance": {"kind": "token", "cap": 2.0}}}
PPO = {"update": {"mini_batch_size": 2}, **WEIGHTS}
GRPO = {"name": "grpo", "update": {"mini_batch_size": 4}, **WEIGHTS}
COMMON = [f"num_iterations={NUM_ITERATIONS}", "critic.ranks=0-1", "reference.ranks=0-1", "actor.ranks=0-1"]
COMMON += ["metrics.dump_batches=true", "checkpoint.save_interval=1", "checkpoint.keep_last=9", "rollout.ranks=2-3"]
OF_GRPO = ["critic=null", "sampling.samples_per_prompt=2", "algorithm=" + json.dumps(GRPO)]
OF_PPO = ["algorithm=" + json.dumps(PPO), "algorithm.kl.controller=adaptive", "reward.normalization=running"]
STALE, TP1 = "rollout.max_staleness=1", "rollout.tensor_parallel_size=1"
STILL = ["actor.optimizer.lr=0", "critic.optimizer.lr=0"]
EVALUATES = ["metrics.eval_interval=2", "metrics.eval_reward=hybridflow.rewards:exact_match"]
POISONED = "algorithm={name: custom, flow: 'tests.flows.stale_flows:poisoned_once', roles: [actor, reward]}"
SAMPLED_TWICE = {"max_generation_rounds": 2}
DYNAMIC = [
    *("critic=null", "reference=null", "sampling.samples_per_prompt=2"),
    "reward=" + json.dumps({"functions": [{"function": "tests.flows.dynamic_rewards:first_is_a_digit"}]}),
    "algorithm=" + json.dumps(GRPO | {"kl": {"use": "none"}, "dynamic_sampling": SAMPLED_TWICE}),
]
RUNS = {
    "sync": [*OF_GRPO, TP1, STILL[0]],
    "stale": [*OF_GRPO, TP1, STILL[0], STALE],
    "sync-ppo": [*OF_PPO, *STILL],
    "stale-ppo": [*OF_PPO, *STILL, STALE],
    "learns": [*OF_GRPO, TP1, STALE],
    "learns-tp2": [*OF_GRPO, STALE],
    "again": [*OF_GRPO, TP1, STALE],
    "short": [*OF_GRPO, TP1, STALE, "num_iterations=3"],
    "short longer": [*OF_GRPO, TP1, STALE],
    "evaluates": [*OF_GRPO, TP1, STALE, *EVALUATES],
    "poisoned": [*OF_GRPO, TP1, STALE, POISONED, "reference=null", "nonfinite={action: skip}"],
    "dynamic": [*DYNAMIC, TP1, STALE],
    "dynamic-tp2": [*DYNAMIC, STALE],
}
# what only a synchronous run, or the other, has or counts so
OTHER = ("reshard/", "staleness")


@pytest.fixture(scope="module")
def root(cases: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("one_step_off")
    config = write_config(root / "config.yaml", make_inputs(root / "inputs"))
    make_longer(root / "inputs" / "train.jsonl")
    tree = json.loads(config.read_text())
    tree["data"]["max_prompt_length"] = 2 * LONGER
    tree["reward"]["models"][0]["ranks"] = "0-1"
    config.write_text(json.dumps(tree))
    runs = {name: [*COMMON, *overrides] for name, overrides in RUNS.items() if name in cases}
    if "evaluates" in runs:
        runs["evaluates"].append(f"data.heldout={root / 'inputs' / 'heldout.jsonl'}")
    run_ranks(4, "tests.flows.one_step_off_worker", config, json.dumps(runs))
    return root


def make_longer(prompts: Path) -> None:
    """By the same tokens, more than a block of the engine's cache: it keeps what it computed of these."""
    told = [json.loads(line) for line in prompts.read_text().splitlines()]
    longer = [row | {"prompt": "1+" * (LONGER // 2) + row["prompt"]} for row in told]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in longer))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("", marks=pytest.mark.cases("sync", "stale")),
        pytest.param("-ppo", marks=[pytest.mark.cases("sync-ppo", "stale-ppo"), pytest.mark.thorough]),
    ],
)
def test_with_a_learning_rate_of_zero_it_is_the_synchronous_run(kind: str, root: Path) -> None:
    stale, synchronous = rows(root / f"stale{kind}", OTHER), rows(root / f"sync{kind}", OTHER)
    assert len(stale) == NUM_ITERATIONS
    assert stale == synchronous
    ages = [float(row["rollout/staleness_mean"]) for row in rows(root / f"stale{kind}")]
    assert ages == [0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.cases("learns")
def test_a_wait_at_a_save_is_counted(root: Path) -> None:
    """All rollouts but the first are handed over when the iteration before is saved, outside the iteration's times."""
    with (root / "learns" / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    waits = [float(row["time/trainers_wait_seconds"]) for row in found]
    assert len(waits) == NUM_ITERATIONS and min(waits) > 0
    assert waits[0] <= float(found[0]["time/rollout_seconds"])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param("again", marks=pytest.mark.cases("learns", "again")),
        pytest.param("learns-tp2", marks=[pytest.mark.cases("learns", "learns-tp2"), pytest.mark.thorough]),
    ],
)
def test_what_it_computes_depends_on_the_seed_alone(other: str, root: Path) -> None:
    """Neither on the clock nor, up to rounding, on how the engine is laid out."""
    expected, found = rows(root / "learns"), rows(root / other)
    assert len(expected) == NUM_ITERATIONS
    if other == "again":
        assert found == expected
    first, last = (batch(root / name, NUM_ITERATIONS) for name in ("learns", other))
    assert first["input_ids"].tolist() == last["input_ids"].tolist()
    assert len({row["actor/grad_norm"] for row in expected}) == NUM_ITERATIONS, "it learns"


@pytest.mark.thorough
@pytest.mark.cases("learns", "evaluates")
def test_an_evaluation_changes_nothing_and_is_of_the_newest_weights(root: Path) -> None:
    expected, found = rows(root / "learns", ("reshard/",)), rows(root / "evaluates", ("reshard/",))
    assert [bool(row["eval/accuracy"]) for row in found] == [True, False, True, False, True, True]  # of 0 to 5
    assert [{name: row[name] for name in expected[0]} for row in found[1:]] == expected


@pytest.mark.cases("poisoned")
def test_an_iteration_that_loses_a_step_costs_no_rollout(root: Path) -> None:
    """The rollout that was under way beside it is trained on next."""
    lengths = [row["rollout/response_length_mean"] for row in rows(root / "poisoned")]
    assert [bool(x) for x in lengths] == [True, True, False, True, True]
    ages = [batch(root / "poisoned", number)["versions"].unique().tolist() for number in (1, 2, 4, 5)]
    assert ages == [[0], [0], [2], [3]]


@pytest.mark.thorough
@pytest.mark.cases("dynamic", "dynamic-tp2")
def test_further_rounds_of_dynamic_sampling_take_the_rollout_that_is_under_way(root: Path) -> None:
    """A group is one update old, or two where it was left over from the iteration before."""
    found = rows(root / "dynamic")
    assert "2.0" in {row["rollout/generation_rounds"] for row in found}
    assert {float(row["rollout/staleness_max"]) for row in found[1:]} <= {1.0, 2.0}
    same = [batch(root / name, NUM_ITERATIONS)["input_ids"].tolist() for name in ("dynamic", "dynamic-tp2")]
    assert same[0] == same[1]


def batch(run: Path, iteration: int) -> dict[str, torch.Tensor]:
    return load_file(run / "batches" / f"iteration_{iteration:06d}.safetensors")


@pytest.mark.cases("learns")
def test_the_engines_log_probs_are_of_the_version_that_a_batch_names(root: Path, tmp_path: Path) -> None:
    """Version 0 is the given model; version k is the checkpoint after iteration k, as transformers reads it."""
    run = root / "learns"
    for iteration in range(1, NUM_ITERATIONS + 1):
        found = batch(run, iteration)
        version = max(0, iteration - 2)
        assert found["versions"].unique().tolist() == [version]
        directory = root / "inputs" / "policy"
        if version:
            directory = tmp_path / str(version)
            convert(["megatron-to-hf", str(run / "checkpoints" / step_name(version) / "actor"), str(directory)])
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        expected = log_probs_of(model, found)
        mask = found["response_mask"]
        torch.testing.assert_close(found["rollout_log_probs"][mask], expected[mask], rtol=0, atol=1e-4)
        if version:
            other = log_probs_of(AutoModelForCausalLM.from_pretrained(root / "inputs" / "policy"), found)
            assert (other[mask] - expected[mask]).abs().max() > 1e-3, "another version would be seen"


def log_probs_of(model: torch.nn.Module, found: dict[str, torch.Tensor]) -> torch.Tensor:
    """(T,) of each token given those before; zero of the first of a row."""
    parts = []
    with torch.no_grad():
        for ids in found["input_ids"].split(found["lengths"].tolist()):
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            parts += [torch.zeros(1), log_probs.gather(1, ids[1:, None])[:, 0]]
    return torch.cat(parts)


@pytest.mark.thorough
@pytest.mark.cases("short", "short longer", "learns")
def test_a_run_that_is_prolonged_says_that_it_is_not_the_longer_run(root: Path) -> None:
    """The last iteration of the shorter run made no next rollout: the fourth has one of the present weights."""
    short, long = rows(root / "short", ("reshard/",)), rows(root / "learns", ("reshard/",))
    assert [row["rollout/staleness_mean"] for row in short] == ["0.0", "1.0", "1.0", "0.0", "1.0"]
    assert short[:3] == long[:3]
