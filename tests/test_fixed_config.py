"""Configs of runs on fixed data: which class a file is of, what is refused and what it says."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_algorithms import DPO
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import load_config
from hybridflow.errors import ConfigError
from tests.messages import like

TRAINED = {"model": "m", "dtype": "float32", "optimizer": {"lr": 1e-3}}
READ = {"model": "m", "dtype": "float32"}


def tree(name: str = "sft", **changes: Any) -> dict[str, Any]:
    models = {
        "sft": {"actor": TRAINED},
        "reward_model": {"reward_model": TRAINED},
        "dpo": {"actor": TRAINED, "reference": READ},
        "kto": {"actor": TRAINED, "reference": READ},
    }[name]
    given = {
        "name": "run",
        "num_iterations": 3,
        "data": {"train": "rows.jsonl", "batch_size": 8, "max_length": 64},
        "algorithm": {"name": name},
        **models,
        **changes,
    }
    return {key: value for key, value in given.items() if value is not ...}


def refused(given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        FixedDataConfig.from_tree(given, "x.yaml")
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("sft", ["actor"]),
        ("reward_model", ["reward_model"]),
        ("dpo", ["actor", "reference"]),
        ("kto", ["actor", "reference"]),
    ],
)
def test_each_algorithm_has_its_models(name: str, roles: list[str]) -> None:
    config = FixedDataConfig.from_tree(tree(name), "x.yaml")
    assert list(config.roles()) == roles
    assert config.trained_name == roles[0]
    assert FixedDataConfig.model_validate(yaml.safe_load(config.to_yaml())) == config


def test_a_file_is_of_the_class_that_its_algorithm_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(tree("dpo")))
    config = load_config(file, ["algorithm.beta=0.5", "algorithm.loss=ipo"])
    assert isinstance(config, FixedDataConfig)
    assert config.algorithm == DPO(beta=0.5, loss="ipo")
    quickstart = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
    assert isinstance(load_config(quickstart), ExperimentConfig)


def test_the_other_class_says_where_such_a_config_is_read() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm.name = 'dpo': this algorithm trains on fixed data. hybridflow.train and"
    ):
        ExperimentConfig.from_tree(tree("dpo"), "x.yaml")


@pytest.mark.parametrize("section", ["sampling", "rollout", "reward", "critic"])
def test_sections_of_generation_are_refused_with_what_to_remove(section: str) -> None:
    said = refused(tree(**{section: {"max_response_length": 8}}))
    assert said == (
        like(
            f"x.yaml: {section}: this algorithm trains on fixed data and generates nothing: remove the section "
            f"{section}, "
            f"or set {section}=null"
        )
    )
    assert FixedDataConfig.from_tree(tree(**{section: None}), "x.yaml").trained_name == "actor"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (tree("dpo", reference=...), "reference: is required by algorithm dpo: add the section reference"),
        (tree("sft", reference=READ), "reference: algorithm sft has none: remove the section reference"),
        (tree("reward_model", actor=TRAINED), "actor: algorithm reward_model has none: remove the section actor"),
        (tree("reward_model", reward_model=...), "reward_model: is required by algorithm reward_model"),
        (tree(num_iterations=...), "num_iterations = null cannot go with num_epochs = null"),
        (tree(num_epochs=2), "num_iterations = 3 cannot go with num_epochs = 2"),
        (tree(actor={**TRAINED, "micro_batch_tokens": 32}), "micro_batch_tokens = 32 cannot hold one sequence: data.m"),
        (tree(actor={**TRAINED, "offload_optimizer": True}), "actor.offload_optimizer = true: a run on fixed data"),
        (tree(metrics={"eval_interval": 2}), "metrics.eval_interval = 2 cannot go with data.heldout = null"),
        (tree(metrics={"eval_reward": "a:b"}), "algorithm.name = sft cannot go with metrics.eval_reward"),
        (
            tree(stop_when={"metric": "eval/loss", "at_most": 1.0}),
            "stop_when.metric = eval/loss needs metrics.eval_interval, which is 0",
        ),
        (tree(stop_when={"metric": "actor/loss"}), "stop_when: at_most = null cannot go with at_least = null"),
        (
            tree(stop_when={"metric": "actor/loss", "at_most": 1, "at_least": 0}),
            "stop_when: at_most = 1.0 cannot go with at_least = 0.0",
        ),
        (tree(checkpoint={"keep_best": 1}), "checkpoint.best_metric = reward/score_mean: there are no rewards"),
        (
            tree(checkpoint={"keep_best": 1, "best_metric": "eval/loss"}),
            "checkpoint.best_metric = eval/loss needs metrics.eval_interval, which is 0",
        ),
        (
            tree(checkpoint={"keep_best": 1, "best_metric": "acter/loss"}),
            "checkpoint.best_metric = acter/loss: there is no such area; did you mean actor/...?",
        ),
        (
            tree(checkpoint={"keep_best": 1, "best_metric": "rollout/gen_kl"}),
            "checkpoint.best_metric = rollout/gen_kl: there is no such area; a run of sft has metrics of actor, data,",
        ),
        (
            tree(checkpoint={"keep_best": 1, "best_metric": "loss"}),
            "checkpoint.best_metric = loss: a metric is called area/name; a run of sft has metrics of actor",
        ),
        (
            tree("reward_model", checkpoint={"keep_best": 1, "best_metric": "actor/loss"}),
            "checkpoint.best_metric = actor/loss: there is no such area",
        ),
        (
            tree("kto", data={"train": "x", "batch_size": 1, "max_length": 9}),
            "data.batch_size = 1: kto compares each prompt with the completion of another row",
        ),
        (
            tree("dpo", algorithm={"name": "dpo", "loss": "ipo", "label_smoothing": 0.1}),
            "algorithm: loss = ipo cannot go with label_smoothing = 0.1",
        ),
        (tree("dpo", algorithm={"name": "dpo", "label_smoothing": 0.5}), "algorithm.label_smoothing = 0.5: input shou"),
        (tree("dpo", algorithm={"name": "dpo", "bta": 0.5}), "algorithm.bta: unknown key; did you mean beta?"),
        (tree(data={"train": "x", "batch_size": 8}), "data.max_length: is required"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    assert said in refused(given)


def test_every_replica_gets_a_row() -> None:
    config = FixedDataConfig.from_tree(tree(data={"train": "x", "batch_size": 3, "max_length": 9}), "x.yaml")
    config.check_world_size(3)
    with pytest.raises(ConfigError, match=r"data.batch_size = 3 leaves replicas of actor without a row"):
        config.check_world_size(4)


def test_epochs_are_whole_batches() -> None:
    config = FixedDataConfig.from_tree(tree(num_iterations=..., num_epochs=3), "x.yaml")
    assert config.iterations(80) == 30
    assert config.iterations(3) == 1  # 9 rows, one of which is left out
    with pytest.raises(ConfigError, match=r"data.batch_size = 8 is more than num_epochs x rows of data.train = 3 x 2"):
        config.iterations(2)
    assert FixedDataConfig.from_tree(tree(), "x.yaml").iterations(1000) == 3


def test_a_micro_batch_of_no_given_size_holds_the_longest_row() -> None:
    long = FixedDataConfig.from_tree(
        tree(data={"train": "rows.jsonl", "batch_size": 8, "max_length": 131072}), "x.yaml"
    )
    assert long.actor.micro_batch_tokens == 131072 and "micro_batch_tokens: 131072" in long.to_yaml()
    assert FixedDataConfig.from_tree(tree(), "x.yaml").actor.micro_batch_tokens == 16384
    for length, expected in ((131072, 131072), (64, 16384)):
        null = tree(actor={**TRAINED, "micro_batch_tokens": None})
        null["data"]["max_length"] = length
        assert FixedDataConfig.from_tree(null, "x.yaml").actor.micro_batch_tokens == expected


def test_a_role_that_two_configs_share_keeps_its_budget() -> None:
    role = FixedDataConfig.from_tree(tree(), "x.yaml").actor
    data = {"train": "rows.jsonl", "batch_size": 8}
    long, short = (
        FixedDataConfig(**tree(actor=role, data={**data, "max_length": length})) for length in (100_000, 100)
    )
    assert (long.actor.micro_batch_tokens, short.actor.micro_batch_tokens) == (100_000, 16384)
