"""Whole runs of `hybridflow.train` on fixed data: a policy, a reward model and a policy beside a reference are killed
and go on bit for bit; what they leave behind is what transformers and a PPO run load."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weight_files import open_checkpoint
from hybridflow.checkpoint.store import step_name
from tests.checkpoint.kills import rows, tensors
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

NUM_ITERATIONS, NUM_ROWS, BATCH_SIZE = 4, 14, 7  # two passes
FLOWS: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": {"name": "sft"}},
    "reward_model": {"algorithm": {"name": "reward_model"}},
    "dpo": {"algorithm": {"name": "dpo", "label_smoothing": 0.1}},
    "kto": {"algorithm": {"name": "kto"}},
}
# where a rank is killed, and at which call of it, in the third iteration
PLACES = {
    "sft": ("hybridflow.models.optimizer:TrainedModel.step", "3"),
    "reward_model": ("hybridflow.checkpoint.writer:write_records", "3"),
    "dpo": ("hybridflow.flows.run:Run.whole", "4"),  # the first is of the evaluation before training
}
# runs that end by a metric, in this order; the first one is started three times
ENDINGS: tuple[tuple[str, list[str]], ...] = (
    ("early", ["stop_when={metric: eval/loss, at_most: 1000}"]),
    ("early", ["stop_when={metric: eval/loss, at_most: 1000}"]),
    ("early", []),
    ("at-once", ["stop_when={metric: actor/loss, at_least: 0}"]),
    ("misnamed", ["stop_when={metric: actor/los, at_least: 0}"]),
    ("never", ["stop_when={metric: eval/loss, at_most: -1}"]),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fixed")
    make_checkpoints(root / "models", family="llama", tied=False)
    for name, count in (("train", NUM_ROWS), ("heldout", 5)):
        write_rows(root / f"{name}.jsonl", count, seed=count)
    for name, given in FLOWS.items():
        (root / f"{name}.yaml").write_text(json.dumps(config(root, given)))
    run_ranks(2, "tests.checkpoint.fixed_worker", root, "undisturbed")
    for name, (place, number) in PLACES.items():
        arguments = ("0", place, number, "0", root / f"{name}.yaml", f"name={name}-killed")
        done = run_ranks(2, "tests.checkpoint.killed_worker", *arguments, check=False)
        assert done.returncode != 0, f"{name}: it was not killed at call {number} of {place}"
    (root / "said").write_text(run_ranks(2, "tests.checkpoint.fixed_worker", root, "killed").stdout)
    return root


def write_rows(path: Path, count: int, seed: int) -> None:
    """With the fields of every kind."""
    source = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = source.randrange(100), source.randrange(100)
        right, wrong = str(a + b), str(a + b + source.randrange(1, 9))
        rows.append(
            {
                "prompt": f"{a}+{b}=",
                "completion": source.choice([right, wrong]),
                "label": source.random() < 0.5,
                "chosen": right,
                "rejected": wrong,
                "margin": source.random(),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(root: Path, given: dict[str, Any]) -> dict[str, Any]:
    policy = {"model": str(root / "models" / "policy"), "dtype": "float32"}
    optimizer = {"lr": 1e-3, "schedule": "linear", "min_lr": 1e-4}
    trained = {**policy, "optimizer": optimizer, "tensor_parallel_size": 2}
    name = given["algorithm"]["name"]
    models = {"reward_model": {**policy, "optimizer": optimizer}} if name == "reward_model" else {"actor": trained}
    if name in ("dpo", "kto"):
        models["reference"] = policy
    data = {"train": str(root / "train.jsonl"), "heldout": str(root / "heldout.jsonl")}
    return {
        "name": "unnamed",
        "seed": 3,
        "output_dir": str(root),
        "num_epochs": 2,
        "data": {**data, "batch_size": BATCH_SIZE, "max_length": 16},
        **models,
        **given,
        "checkpoint": {"save_interval": 1, "keep_last": 9},
        "metrics": {"tensorboard": False, "eval_interval": 2, "num_samples": 2},
    }


@pytest.mark.parametrize("name", PLACES)
def test_a_run_that_was_killed_goes_on_bit_for_bit(name: str, root: Path) -> None:
    undisturbed, killed = root / f"{name}-undisturbed", root / f"{name}-killed"
    assert rows(killed) == rows(undisturbed)
    assert tensors(killed, NUM_ITERATIONS) == tensors(undisturbed, NUM_ITERATIONS)
    assert tensors(undisturbed, 2) != tensors(undisturbed, NUM_ITERATIONS), "it has learnt in between"
    for file in ("model.safetensors", "config.json"):
        assert (killed / "hf" / file).read_bytes() == (undisturbed / "hf" / file).read_bytes()
    assert (killed / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()


def test_a_run_ends_where_its_metric_is_reached(root: Path) -> None:
    """It stays ended, and without the rule it goes on to what a run does that never had one."""
    said = (root / "said").read_text().split("---- ")
    assert [part.split()[0] for part in said[1:]] == [name for name, _ in ENDINGS]
    first, again, on, at_once, misnamed, never = (" ".join(part.split()) for part in said[1:])
    assert "iteration 2 of 4 was the last: eval/loss = " in first and "is at most 1000 (stop_when)" in first
    assert "the run is over: eval/loss = " in again and "iteration 3/4" not in again
    assert "iteration 2/4" not in on and "iteration 4/4" in on
    undisturbed = root / "sft-undisturbed"
    assert rows(root / "early") == rows(undisturbed)
    assert tensors(root / "early", NUM_ITERATIONS) == tensors(undisturbed, NUM_ITERATIONS)
    assert "iteration 1 of 4 was the last: actor/loss = " in at_once
    [_, row] = csv.DictReader((root / "at-once" / "metrics.csv").open(newline=""))
    assert row["eval/loss"], "the last iteration is evaluated, whichever it is"
    assert (root / "at-once" / "checkpoints" / step_name(1)).is_dir() and (root / "at-once" / "hf").is_dir()
    warning = "warning: stop_when.metric = actor/los: this iteration has no such metric; there are actor/loss"
    assert misnamed.count(warning) == 1 and "iteration 4/4" in misnamed
    assert rows(root / "never") == rows(undisturbed) and "stop_when" not in never


@pytest.mark.parametrize("name", FLOWS)
def test_what_is_recorded(name: str, root: Path) -> None:
    found = rows(root / f"{name}-undisturbed")
    area = "reward_model" if name == "reward_model" else "actor"
    assert float(found[-1][f"{area}/loss"]) < float(found[1][f"{area}/loss"])
    assert all(row[f"{area}/grad_norm"] and row["data/trained_tokens"] for row in found[1:])
    assert [bool(row["eval/loss"]) for row in found] == [True, False, True, False, True]
    assert ("eval/reward_accuracy" in found[0]) == (name in ("dpo", "reward_model"))
    assert [float(row["data/epoch"]) for row in found[1:]] == [0.5, 1.0, 1.5, 2.0]


def test_each_row_is_seen_once_a_pass(root: Path) -> None:
    shown = [json.loads(line) for line in (root / "sft-undisturbed" / "samples.jsonl").read_text().splitlines()]
    given = {(row["prompt"], row["completion"]) for row in map(json.loads, (root / "train.jsonl").open())}
    assert {(row["prompt"], row["response"]) for row in shown} <= given
    first_pass = [row["prompt"] for row in shown if row["iteration"] <= 2]
    assert len(set(first_pass)) == len(first_pass) == 4


def test_transformers_load_what_was_trained(root: Path) -> None:
    """The policy's held-out loss and the reward model's scores are those that the run told."""
    run = root / "sft-undisturbed"
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    policy = AutoModelForCausalLM.from_pretrained(run / "hf")
    losses = []
    for row in map(json.loads, (root / "heldout.jsonl").open()):
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([*prompt, *tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id])
        with torch.no_grad():
            log_probs = policy(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        losses.append(-log_probs.gather(1, ids[1:, None])[len(prompt) - 1 :, 0])
    assert float(torch.cat(losses).mean()) == pytest.approx(float(rows(run)[-1]["eval/loss"]), rel=1e-5)

    run = root / "reward_model-undisturbed"
    model = AutoModelForSequenceClassification.from_pretrained(run / "hf")
    assert json.loads((run / "hf" / "rendering.json").read_text()) == {"rows": "texts"}
    spec = read_spec(run / "hf")  # as a PPO run reads it
    assert spec.head == "score" and "score.weight" in open_checkpoint(run / "hf", spec)
    assert model.config.num_labels == 1 and model.score.weight.abs().sum() > 0
    margins = []
    for row in map(json.loads, (root / "heldout.jsonl").open()):
        texts = [tokenizer(row["prompt"] + row[key])["input_ids"] for key in ("chosen", "rejected")]
        with torch.no_grad():
            good, bad = (model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits[0, 0] for ids in texts)
        margins.append(float(good - bad))
    assert sum(margins) / len(margins) == pytest.approx(float(rows(run)[-1]["eval/reward_margin_mean"]), rel=1e-4)
