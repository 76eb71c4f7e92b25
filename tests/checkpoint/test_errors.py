"""A run that ends with an error of one rank is saved after the last whole iteration, and goes on from there."""

import json
from pathlib import Path

import pytest

from hybridflow.checkpoint.state import load_state
from hybridflow.checkpoint.store import step_name, steps
from tests.checkpoint.kills import rows, tensors
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

FUNCTION = "tests.checkpoint.errors_worker:score"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("errors")
    inputs = make_inputs(root / "inputs")
    data = inputs / "train.jsonl"
    numbered = [json.loads(line) | {"number": i} for i, line in enumerate(data.read_text().splitlines())]
    data.write_text("".join(json.dumps(row) + "\n" for row in numbered))
    heldout = [row | {"number": row["number"] + 3} for row in numbered[:3]]
    (inputs / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in heldout))
    path = write_config(root / "config.yaml", inputs)
    tree = json.loads(path.read_text())
    tree["data"]["heldout"] = str(inputs / "heldout.jsonl")
    tree |= {"num_iterations": 4, "critic": None, "reference": None}
    tree["reward"] = {"functions": [{"function": FUNCTION, "arguments": {"flag": str(root / "score.broken")}}]}
    tree["metrics"] |= {
        "eval_interval": 3,
        "eval_reward": {"function": FUNCTION, "arguments": {"flag": str(root / "judge")}},
    }
    tree["algorithm"] = {"name": "grpo", "kl": {"use": "none"}, "update": {"mini_batch_size": 4}}
    tree["sampling"]["samples_per_prompt"] = 2
    path.write_text(json.dumps(tree))
    run_ranks(2, "tests.checkpoint.errors_worker", path, root, root / "told.json")
    return root


@pytest.mark.parametrize(("name", "saved"), [("score", 2), ("judge", 3)])
def test_an_error_of_one_rank_saves_the_last_whole_iteration(name: str, saved: int, root: Path) -> None:
    found = [json.loads((root / f"told.{rank}.json").read_text()) for rank in range(2)]
    broken = [told[f"{name} broken"] for told in found]
    assert [text.partition(":")[0] for text in sorted(broken)] == ["OfAnotherRank", "RewardError"], broken
    assert all(f"the run is saved after iteration {saved} (" in text for text in broken)
    assert all(told[f"{name} mended"] == told["whole mended"] == "" for told in found)
    left_out = ("eval/",) * (name == "judge")  # no evaluation is made again
    assert rows(root / name, left_out) == rows(root / "whole", left_out)
    assert steps(root / name / "checkpoints")[-1] == 4
    whole, known = rows(root / "whole", left_out), load_state(root / name / "checkpoints" / step_name(saved)).metrics
    assert known["actor/grad_norm"] == pytest.approx(float(whole[saved]["actor/grad_norm"]))  # behind the start's row
    assert tensors(root / name, 4) == tensors(root / "whole", 4)
