"""Keys of other trainers: each gives an error that names ours, and ours exist; docs/migrate/keys.md says the same."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hybridflow.config import ALGORITHMS, ExperimentConfig, set_key
from hybridflow.config.fixed_algorithms import FIXED_ALGORITHMS
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.other_trainers import (
    NOT_HERE,
    NOTHING_ON_FIXED_DATA,
    algorithm_hint,
    algorithm_names,
    hint,
    leaves,
    other_keys,
)
from hybridflow.errors import ConfigError
from tests.messages import like
from tests.test_config import MINIMAL

ROOT = Path(__file__).resolve().parents[1]
ROWS, FIXED_ROWS, NAMES = other_keys().rows, other_keys(fixed=True).rows, algorithm_names()
DOCUMENT = ROOT / "docs" / "migrate" / "keys.md"
# named already, and yet to come
VERL = ("actor", "ref", "rollout", "model")  # that stand below actor_rollout_ref there


def quoted(text: str) -> list[str]:
    """What stands between backticks within a line, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def keys_of(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every key of a section and of those in it; of lists the first."""
    for name, field in section.model_fields.items():
        key = f"{path}{name}"
        yield key
        for inner in sections_in(field.annotation):
            yield from keys_of(inner, f"{key}.")
            yield from keys_of(inner, f"{key}.0.")
    if section is ExperimentConfig:
        for algorithm in ALGORITHMS.values():
            yield from keys_of(algorithm, "algorithm.")


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from sections_in(argument)


OURS = set(keys_of(ExperimentConfig))


def message(path: str, value: Any = "1") -> str:
    """What a config with this key says."""
    tree = copy.deepcopy(MINIMAL)
    set_key(tree, path.split("."), value, "test")
    with pytest.raises(ConfigError) as raised:
        ExperimentConfig.from_tree(tree, "x.yaml")
    return str(raised.value)


def rows_of_the_document(*, fixed: bool = False) -> list[tuple[list[str], list[str]]]:
    """(our keys, their keys) of every row: of runs that generate, or on fixed data."""
    before, heading, after = DOCUMENT.read_text().partition("## SFT, reward models, DPO, KTO")
    assert heading
    own, _, rest = after.partition("## ")
    text, known = (own, OURS_FIXED) if fixed else (before + rest, OURS)
    cells = [row.strip("|").split(" | ") for row in text.splitlines() if row.startswith("| ") and "| TRL |" not in row]
    assert {len(row) for row in cells} == {5}
    return [
        ([key for key in quoted(row[0]) if key in known], [key for cell in row[1:] for key in quoted(cell)])
        for row in cells
    ]


# ------------------------------------------------------------------------------------------------ the table


def test_every_key_of_ours_exists() -> None:
    named = {key.replace("ROLE", "actor").partition("=")[0] for ours, _, _ in ROWS for key in ours.split()}
    assert named - OURS == set()
    notes = {f"actor.{key}" for _, _, note in ROWS for key in re.findall(r"ROLE\.([\w.]+\w)", note)}
    assert notes and notes <= OURS


def test_every_value_of_ours_is_one() -> None:
    pairs = {tuple(key.split("=")) for ours, _, _ in ROWS for key in ours.split() if "=" in key}
    names = {value for key, value in pairs if key == "algorithm.name"} | set(NAMES.values())
    assert names - ALGORITHMS.keys() - FIXED_ALGORITHMS.keys() == set()
    for key, value in sorted(pairs):
        if key != "algorithm.name":
            tree = copy.deepcopy(MINIMAL)
            set_key(tree, ["algorithm", "kl", "estimator"], "k2", "test")  # which goes with each use
            set_key(tree, key.split("."), value, "test")
            ExperimentConfig.from_tree(tree, "x.yaml")


def test_a_key_stands_in_one_row() -> None:
    every = [key for _, theirs, _ in ROWS for key in theirs.split()]
    assert sorted({key for key in every if every.count(key) > 1}) == []
    assert len(other_keys().table) == len(every) > 400


@pytest.mark.parametrize(("ours", "theirs", "note"), ROWS, ids=[row[1].split()[0] for row in ROWS])
def test_every_key_of_theirs_names_ours(ours: str, theirs: str, note: str) -> None:
    """At the top, or, where a section of ours has that name, in one of another trainer's."""
    for key in theirs.split():
        found = message(f"theirs.{key}" if key.partition(".")[0] in OURS else key)
        role = "reward.models.0" if key.startswith("reward.") else "actor"
        named = " and ".join(one.replace("ROLE", role) for one in ours.split())
        said = f"here it is {named}" if ours else "there is none here"
        assert f"{key}: unknown key; {said}" in found, found


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("actor_rollout_ref.rollout.n", "here it is sampling.samples_per_prompt"),
        ("rollout.n", "here it is sampling.samples_per_prompt"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "here it is rollout.tensor_parallel_size"),
        ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size", "here it is reference.tensor_parallel_size"),
        ("actor_rollout_ref.actor.optim.lr", "here it is actor.optimizer.lr"),
        ("critic.optim.lr", "here it is critic.optimizer.lr"),
        ("critic.lr", "here it is critic.optimizer.lr"),
        ("reference.learning_rate", "here it is actor.optimizer.lr"),
        ("actor_rollout_ref.ref.megatron.expert_model_parallel_size", "here it is reference.expert_parallel_size"),
        ("critic.megatron.expert_tensor_parallel_size", "here it is critic.expert_tensor_parallel_size"),
        ("actor_rollout_ref.rollout.expert_parallel_size", "here it is rollout.enable_expert_parallel (true or"),
        (
            "policy.megatron_cfg.num_layers_in_last_pipeline_stage",
            "here it is actor.num_layers_in_last_pipeline_stage",
        ),
        (
            "async_training.staleness_threshold",
            "async_training: unknown key; here it is rollout.max_staleness (in",
        ),
        ("grpo.async_grpo.max_trajectory_age_steps", "here it is rollout.max_staleness (in updates"),
        ("async_grpo.in_flight_weight_updates", "async_grpo: unknown key; here it is rollout.max_staleness"),
        ("rollout.in_flight_weight_updates", "there is none here: weights change between engine steps"),
        ("reward_model.reward_manager", "here it is reward.functions.0.per and reward.overlong (no manager"),
        ("reward.reward_manager.name", "here it is reward.functions.0.per and reward.overlong (no manager"),
        ("reward_manager.name", "here it is reward.functions.0.per and reward.overlong (no manager"),
        ("reward.tensor_model_parallel_size", "here it is reward.models.0.tensor_parallel_size"),
        ("rollout.precision", "here it is actor.dtype (bfloat16 or float32)"),
        ("algorithm.kl_loss_coef", "here it is algorithm.kl.coef"),
        ("data.max_response_length", "here it is sampling.max_response_length (tokens, the end token included)"),
        ("data.train_batch_size", "here it is data.prompts_per_iteration (prompts, each with sampling.samples_per"),
        ("train_batch_size", "here it is data.prompts_per_iteration and algorithm.update.mini_batch_size (the first"),
        ("actor.fsdp_config", "there is none here, megatron-core trains: weights are split by actor.tensor_parallel"),
        ("critic.strategy", "there is none here, megatron-core trains: weights are split by critic.tensor_parallel"),
        # adapters
        ("lora.rank", "lora.rank: unknown key; here it is actor.lora.rank (32 unless given)"),
        ("lora", "lora: unknown key; here it is actor.lora (a section; null trains all weights)"),
        (
            "reference.lora.rank",
            "here it is actor.lora (the reference is the actor without adapters: leave the section",
        ),
        ("reference.lora", "here it is actor.lora (the reference is the actor without adapters: leave the section"),
        ("rollout.lora.rank", "here it is actor.lora.rank"),
        ("actor_rollout_ref.model.lora_rank", "here it is actor.lora.rank"),
        ("actor_rollout_ref.model.lora.rank", "here it is actor.lora.rank"),
        ("actor_rollout_ref.model.lora.merge", "there is none here: adapters are never merged for generation"),
        ("actor_rollout_ref.model.target_modules", "here it is actor.lora.target_modules (names as HuggingFace has"),
        ("policy.megatron_cfg.peft.dim", "here it is actor.lora.rank"),
        ("policy.dtensor_cfg.lora_cfg.exclude_modules", "here it is actor.lora.exclude_modules"),
        ("ds.lora.dropout", "there is none here: log-probs of training are compared with those of the engine"),
        ("ds.load_in_4bit", "there is none here: the base model has actor.dtype, in the one copy of trainer and"),
        ("critic.lora_alpha", "here it is critic.lora.alpha"),
        ("actor.lora.r", "here it is actor.lora.rank"),
        ("actor.lora.dora", "there is none here: an adapter is W x + scale B A x"),
        ("actor.lora.use_dora", "there is none here: an adapter is W x + scale B A x"),
        ("actor.lora.rnk", "did you mean rank?"),
        # ours first: a slip of the pen, a key that has moved, a key of another algorithm
        ("actor.optimizer.beta", "did you mean betas?"),
        ("samplng", "did you mean sampling?"),
        ("algorithm.policy.cliprange", "did you mean clip_range?"),
        ("theirs.foo", "known are name, seed"),
    ],
)
def test_what_is_said_depends_on_the_place(path: str, expected: str) -> None:
    assert expected in message(path)


def test_adapters_of_a_model_that_scores_are_told_to_be_of_one_that_is_trained() -> None:
    tree = copy.deepcopy(MINIMAL)
    tree["reward"] = {"models": [{"model": "m", "lora": {"rank": 8}}]}
    with pytest.raises(
        ConfigError, match=r"reward.models.0.lora.rank: unknown key; here it is actor.lora and critic.lora"
    ):
        ExperimentConfig.from_tree(tree, "x.yaml")


def test_ours_in_an_algorithm_without_it_is_not_told_as_anothers() -> None:
    tree = copy.deepcopy(MINIMAL) | {"algorithm": {"name": "grpo", "gamma": 1.0}, "critic": None}
    with pytest.raises(ConfigError, match=re.escape("algorithm.gamma: unknown key; known are name, ")):
        ExperimentConfig.from_tree(tree, "x.yaml")


def test_a_whole_section_is_told_key_by_key() -> None:
    """What nobody knows is counted where it is much."""
    tree = {"optim": {"lr": 1e-6, "foo": 1}, "ppo_epochs": 2, "fsdp_config": {"param_offload": True}}
    assert message("actor_rollout_ref.actor", tree).splitlines() == [
        like("x.yaml: actor_rollout_ref.actor.optim.lr: unknown key; here it is actor.optimizer.lr"),
        like(
            "x.yaml: actor_rollout_ref.actor.ppo_epochs: unknown key; here it is algorithm.update.epochs "
            "(passes over the "
            "batch of an iteration)"
        ),
        like(
            "x.yaml: actor_rollout_ref.actor.fsdp_config: unknown key; there is none here, megatron-core "
            "trains: weights "
            "are split by actor.tensor_parallel_size and actor.pipeline_parallel_size, optimizer state by "
            "actor.optimizer.zero1"
        ),
        "x.yaml: actor_rollout_ref.actor.optim.foo: unknown key",
    ]
    many = {"lr": 1e-6} | {f"foo{i}": i for i in range(5)}
    assert message("trainer", many).splitlines() == [
        like("x.yaml: trainer.lr: unknown key; here it is actor.optimizer.lr"),
        like("x.yaml: trainer: 5 more unknown keys in it: trainer.foo0, trainer.foo1, trainer.foo2, ..."),
    ]


def test_a_key_named_with_its_section_is_told_beside_the_section() -> None:
    tree = {"enable": True, "path": "x", "reward_manager": "dapo"}
    assert list(leaves(tree, ("reward_model",))) == [("reward_model", "reward_manager"), ("reward_model",)]
    assert list(leaves({"enable": True}, ("reward_model",))) == [("reward_model",)]
    assert list(leaves({"reward_manager": "dapo"}, ("reward_model",))) == [("reward_model", "reward_manager")]


def test_leaves_end_where_a_key_is_known() -> None:
    tree = {"fsdp_config": {"a": 1}, "b": {"c": {}, "lr": 1}}
    assert list(leaves(tree, ("x",))) == [("x", "fsdp_config"), ("x", "b", "c"), ("x", "b", "lr")]
    assert hint(("x", "b", "c")) is None


@pytest.mark.parametrize("name", [*NAMES, *NOT_HERE])
def test_another_name_of_an_algorithm_is_told(name: str) -> None:
    found = message("algorithm", {"name": name})
    assert f"x.yaml: algorithm.name = {name!r}: is no algorithm; {algorithm_hint(name)}" in found
    if name in NAMES:
        assert f"; here it is {NAMES[name]}" in found


# ------------------------------------------------------------------------------------------------ fixed data


OURS_FIXED = set(keys_of(FixedDataConfig)) | {
    key for algorithm in FIXED_ALGORITHMS.values() for key in keys_of(algorithm, "algorithm.")
}
DPO = {
    "name": "run",
    "num_epochs": 1,
    "data": {"train": "pairs.jsonl", "batch_size": 1, "max_length": 64},
    "actor": {"model": "actor", "optimizer": {"lr": 1e-4}},
    "reference": {"model": "actor"},
    "algorithm": {"name": "dpo"},
}


def message_on_fixed_data(path: str) -> str:
    tree = copy.deepcopy(DPO)
    set_key(tree, path.split("."), "1", "test")
    with pytest.raises(ConfigError) as raised:
        FixedDataConfig.from_tree(tree, "x.yaml")
    return str(raised.value)


def test_the_keys_of_fixed_data_exist_and_stand_in_one_row() -> None:
    every = [key for _, theirs, _ in FIXED_ROWS for key in theirs.split()]
    assert sorted({key for key in every if every.count(key) > 1}) == []
    named = {key for ours, _, _ in FIXED_ROWS for key in ours.split()}
    assert named - OURS_FIXED == set()


@pytest.mark.parametrize(("ours", "theirs", "note"), FIXED_ROWS, ids=[row[1].split()[0] for row in FIXED_ROWS])
def test_every_key_of_fixed_data_names_ours(ours: str, theirs: str, note: str) -> None:
    for key in theirs.split():
        path = key if key.partition(".")[0] not in OURS_FIXED else f"theirs.{key}"
        said = f"here it is {ours}" if ours else "there is none here"
        found = message_on_fixed_data(path)
        assert f"{path}: unknown key; {said}" in found, found


def test_no_key_of_generation_is_told_on_fixed_data() -> None:
    """What every other key says names a key of such a config, or that there is none."""
    for key in other_keys().table.keys() - other_keys(fixed=True).table.keys():
        found = hint(("theirs", *key.split(".")), fixed=True)
        assert found is not None
        named = re.findall(r"here it is ([\w.=]+(?: and [\w.=]+)*)", found)
        for one in named[0].split(" and ") if named else ():
            assert one.partition("=")[0] in OURS_FIXED, f"{key}: {found}"
    assert hint(("rollout", "n"), fixed=True) == NOTHING_ON_FIXED_DATA


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("algorithm.loss_type", "here it is algorithm.loss (of dpo: sigmoid or ipo)"),
        ("policy.max_total_sequence_length", "here it is data.max_length"),
        ("reward_model.lora_rank", "here it is reward_model.lora.rank"),
        ("finetuning_type", "here it is actor.lora (a section for lora; without the section all weights"),
        ("lora_target", "here it is actor.lora.target_modules"),
        ("learning_rate", "here it is actor.optimizer.lr"),
        ("reward_model_cfg.reward.learning_rate", "here it is reward_model.optimizer.lr"),
        ("dpo.max_num_epochs", "here it is num_epochs (passes over data.train)"),
        ("megatron.override_transformer_config", "here it is actor.megatron_arguments"),
        ("algorithm.betta", "did you mean beta?"),
        ("data.max_lenght", "did you mean max_length?"),
    ],
)
def test_what_is_said_on_fixed_data(path: str, expected: str) -> None:
    assert expected in message_on_fixed_data(path)


# ------------------------------------------------------------------------------------------------ the document


def test_the_documents_keys_of_ours_exist() -> None:
    cells = [line.strip("|").split(" | ")[0] for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    named = {key for cell in cells for key in quoted(cell) if "." in key and "/" not in key}
    assert len(named) > 70
    assert named <= OURS | OURS_FIXED


def test_the_documents_keys_of_theirs_name_ours() -> None:
    rows = rows_of_the_document()
    assert len(rows) > 90 and sum(len(theirs) for _, theirs in rows) > 250
    for ours, theirs in rows:
        for key in theirs:
            if key in OURS:
                assert key in ours, key
                continue
            for path in (key, f"actor_rollout_ref.{key}") if key.partition(".")[0] in VERL else (key,):
                found = message(path)
                said = "here it is" in found or "there is none here" in found
                assert said and any(one in found for one in ours or [""]), f"{path}: {found}"


def test_the_documents_keys_of_theirs_on_fixed_data_name_ours() -> None:
    rows = rows_of_the_document(fixed=True)
    assert len(rows) > 15 and sum(len(theirs) for _, theirs in rows) > 50
    for ours, theirs in rows:
        for key in set(theirs) - {*ours, *OURS_FIXED}:
            found = message_on_fixed_data(key)
            said = "here it is" in found or "there is none here" in found
            assert said and any(one in found for one in ours or [""]), f"{key}: {found}"


def test_the_documents_example_is_what_is_said() -> None:
    [(command, output)] = re.findall(r"^\$ (.*?)\n(.*?)^```", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)
    *_, path, first, second = command.split()
    with pytest.raises(ConfigError) as raised:
        ExperimentConfig.from_yaml(ROOT / path, [first, second])
    said = str(raised.value).replace(f"{ROOT}/", "").splitlines()
    assert [f"hybridflow.plan: error: {line}" for line in said] == output.splitlines()
