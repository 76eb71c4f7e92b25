"""The stages from nothing to a better policy, without their trainings: what each is told, and on which rows."""

import json
import random
import shutil
from pathlib import Path

import pytest

from hybridflow.fixed_config import AnyConfig, load_config
from tools import stages
from tools.tiny_task import Problem, is_right


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def told(root: Path) -> dict[str, AnyConfig]:
    """The config of each run, by its name, in their order. A run leaves the model that it began with."""
    configs: dict[str, AnyConfig] = {}

    def ran(config: str, overrides: stages.Overrides) -> None:
        found = load_config(stages.CONFIGS / config, [f"{key}={value}" for key, value in overrides.items()])
        configs[found.name] = found
        begun = next(iter(found.roles().values())).model
        assert (
            Path(begun).is_dir() and Path(str(found.data.train)).is_file() and Path(str(found.data.heldout)).is_file()
        )
        shutil.copytree(begun, found.run_dir / "hf")
        (found.run_dir / "metrics.csv").write_text("iteration,eval/reward_accuracy\n0,0.5\n9,0.75\n10,\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "train", ran)
        reached = stages.Stages(root / "seed", seed=4).run()
    assert reached.right == dict.fromkeys(stages.ADDS, 0.0), "random weights add nothing"
    assert reached.pairs_right == 0.75 and reached.seed == 4
    return configs


def test_each_stage_begins_where_another_has_ended(told: dict[str, AnyConfig], root: Path) -> None:
    runs = root / "seed" / "runs"
    begun = {name: [role.model for role in config.roles().values()] for name, config in told.items()}
    sft, judge = str(runs / "sft" / "hf"), str(runs / "reward_model" / "hf")
    assert begun == {
        "sft": [str(root / "seed" / "start")],
        "adder": [sft],
        "reward_model": [str(root / "seed" / "judge")],
        "ppo": [sft, judge, sft, judge],
        "dpo": [sft, sft],
        "distill": [sft, str(runs / "adder" / "hf")],
    }
    assert list(begun) == ["sft", "adder", "reward_model", "ppo", "dpo", "distill"]
    assert {config.seed for config in told.values()} == {4}
    assert {name: config.algorithm.name for name, config in told.items()} == {
        "sft": "sft",
        "adder": "sft",
        "reward_model": "reward_model",
        "ppo": "ppo",
        "dpo": "dpo",
        "distill": "distill",
    }


def test_the_policys_own_mistakes_are_among_the_pairs(told: dict[str, AnyConfig], root: Path) -> None:
    own, judged = ([json.loads(line) for line in (root / "seed" / f"{x}.jsonl").open()] for x in ("own", "judged"))
    assert own and all(row in judged for row in own[:50]) and len(judged) > 4 * len(own)
    for row in own:
        left, right = map(int, row["prompt"].rstrip("=").split("+"))
        assert row["chosen"] == str(left + right) and not is_right(row["rejected"], row["chosen"])


def test_beginnings_differ_in_their_last_digit() -> None:
    rows = stages.beginnings(Problem(47, 85), random.Random(0))
    assert [row["chosen"] for row in rows] == ["1", "13", "132"] and {row["prompt"] for row in rows} == {"47+85="}
    for row in rows:
        assert row["rejected"][:-1] == row["chosen"][:-1] and row["rejected"][-1] in set("0123456789") - {
            row["chosen"][-1]
        }


def test_a_stage_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stages, "TRAIN", ("-c", "import sys; sys.exit(3)"))
    with pytest.raises(stages.StageFailed, match="mine has ended with status 3"):
        stages.train("quickstart_sft.yaml", {"name": "mine"})
