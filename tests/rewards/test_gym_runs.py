"""Runs on tasks of reasoning-gym: rows, scores and evaluations are what the package gives."""

import csv
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.environments.tiny_chat import CHARACTERS, make_tokenizer
from tests.gym import needs_package
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.thorough, needs_package]

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
CASES = {
    "sums": [{"name": "chain_sum", "size": 64, "seed": 1, "config": SUMS}],
    "mixed": [
        {"name": "letter_counting", "size": 40, "seed": 1, "weight": 1.0, "config": {"max_words": 6}},
        {"name": "countdown", "size": 8, "seed": 5, "weight": 1.0, "execute": True},
    ],
}
HELDOUT = [{"name": "chain_sum", "size": 6, "seed": 100, "config": SUMS}]
Sample = dict[str, object]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_checkpoints(
        tmp_path_factory.mktemp("gym"), family="llama", tied=False, head_dim=32, max_length=1024
    )
    make_tokenizer().save_pretrained(root / "policy")
    digits = [4 + i for i, character in enumerate(CHARACTERS) if character in "0123456789+-"]
    tree = {
        "name": "run",
        "seed": 1,
        "output_dir": str(root),
        "num_iterations": 3,
        "data": {
            "train": {"reasoning_gym": CASES["sums"], "system_prompt": None},
            "heldout": {"reasoning_gym": HELDOUT, "system_prompt": None},
            "prompts_per_iteration": 4,
            "max_prompt_length": 900,
            "chat_template": True,
        },
        "sampling": {"samples_per_prompt": 4, "max_response_length": 3, "allowed_token_ids": digits},
        "actor": {"model": str(root / "policy"), "dtype": "float32", "optimizer": {"lr": 1e-3}},
        "reward": {"functions": [{"function": "hybridflow.rewards:reasoning_gym", "arguments": {"tagged": False}}]},
        "rollout": {"kv_cache_gib": 0.0625},
        "algorithm": {"name": "grpo", "kl": {"use": "none"}},
        "metrics": {"tensorboard": False, "dump_batches": True, "num_samples": 16, "eval_interval": 2},
        "checkpoint": {"load": "none"},
    }
    (root / "config.yaml").write_text(json.dumps(tree))
    return root


def scores_of_package(case: str, samples: list[Sample]) -> list[float]:
    """What the package gives these responses, by entries that it makes anew."""
    from reasoning_gym.factory import create_dataset

    entries = {}
    for task in [*CASES[case], *HELDOUT]:
        data = create_dataset(task["name"], size=task["size"], seed=task["seed"], **task.get("config", {}))
        entries |= {entry["question"]: (data, entry) for entry in data}
    found = []
    for sample in samples:
        data, entry = entries[sample["columns"]["question"]]
        found.append(data.score_answer(sample["response"].strip(), entry))
    return found


@pytest.mark.parametrize("case", CASES)
def test_scores_are_the_packages(root: Path, case: str) -> None:
    train = json.dumps({"reasoning_gym": CASES[case], "system_prompt": None})
    run_ranks(1, "hybridflow.train", root / "config.yaml", f"data.train={train}", f"name={case}")
    rows = list(csv.DictReader((root / case / "metrics.csv").open()))
    assert len(rows) == 4 and any(float(row["actor/grad_norm"]) > 0 for row in rows[1:])  # one before training
    samples = [json.loads(line) for line in (root / case / "samples.jsonl").read_text().splitlines()]
    of_kind = {kind: [one for one in samples if one["kind"] == kind] for kind in ("train", "heldout")}
    for kind, some in of_kind.items():
        expected = scores_of_package(case, some)
        assert [one["score"] for one in some] == pytest.approx(expected), kind
    assert len(of_kind["train"]) == 48 and len(of_kind["heldout"]) == 6 * 3
    assert any(one["score"] > 0 for one in of_kind["train"])
    batch = load_file(root / case / "batches" / "iteration_000001.safetensors")
    first = [one["score"] for one in of_kind["train"] if one["iteration"] == 1]
    assert sorted(batch["raw_scores"].tolist()) == pytest.approx(sorted(first))
    right = [one["score"] == 1 for one in of_kind["heldout"] if one["iteration"] == 2]
    assert float(rows[2]["eval/accuracy"]) == pytest.approx(sum(right) / 6)


def test_rows_that_are_made_anew_let_a_run_resume(root: Path, tmp_path: Path) -> None:
    """The checkpoint has a digest of them. Another seed is another row, and refused."""
    save = ["name=resumed", "checkpoint={save_interval: 1}", "metrics.eval_interval=0", "data.heldout=null"]
    command = (1, "hybridflow.train", root / "config.yaml", *save)
    run_ranks(*command, "num_iterations=1")
    other = json.dumps({"reasoning_gym": [{**CASES["sums"][0], "seed": 2}], "system_prompt": None})
    refused = run_ranks(*command, "num_iterations=2", f"data.train={other}", check=False)
    assert refused.returncode and "the saved place in the order of prompts means another prompt" in refused.stderr
    run_ranks(*command, "num_iterations=2", environment={"HOME": str(tmp_path)})
    rows = list(csv.DictReader((root / "resumed" / "metrics.csv").open()))
    assert [row["iteration"] for row in rows] == ["1", "2"]
    assert list((tmp_path / ".cache" / "hybridflow" / "reasoning_gym").glob("chain_sum-*.jsonl"))
