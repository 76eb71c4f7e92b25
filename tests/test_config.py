"""The experiment config: what it accepts, what each mistake's message says, overrides, and the shipped files."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.config import ExperimentConfig
from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.files import as_flow
from hybridflow.config.kinds import load_config
from hybridflow.config.world_size import world_size_to_try
from hybridflow.errors import ConfigError, UserError
from hybridflow.parallel.layout import Layout

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))

MINIMAL: dict[str, Any] = {
    "name": "run-1",
    "num_iterations": 10,
    "data": {"train": "train.jsonl", "prompts_per_iteration": 8, "max_prompt_length": 100},
    "sampling": {"samples_per_prompt": 2, "max_response_length": 50},
    "actor": {"model": "models/policy", "optimizer": {"lr": 1.0e-5}},
    "critic": {"model": "models/value", "optimizer": {"lr": 2.0e-5}},
    "reference": {"model": "models/policy"},
    "reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]},
    "algorithm": {"update": {"mini_batch_size": 4}},
}
REWARD_MODELS = [{"model": "models/a"}, {"model": "models/b", "weight": 0.5}]


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """MINIMAL with dotted keys set."""
    tree = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return tree


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    """Writes MINIMAL with changes, or a text as it stands, and gives the path."""

    def write(content: dict[str, Any] | str = "") -> Path:
        path = tmp_path / "experiment.yaml"
        text = content if isinstance(content, str) and content else yaml.safe_dump(changed(content or {}))
        path.write_text(text)
        return path

    return write


def problem(path: Path, *overrides: str) -> str:
    """The message of loading a config that does not hold."""
    with pytest.raises(ConfigError) as raised:
        ExperimentConfig.from_yaml(path, overrides)
    assert isinstance(raised.value, UserError)
    return str(raised.value)


def load(**changes: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(changed(changes))


# ------------------------------------------------------------------------------------------------ what is accepted


def test_the_reward_functions_of_a_run_judge_where_nothing_else_does() -> None:
    evaluated = {"metrics.eval_interval": 5, "data.heldout": "heldout.jsonl"}
    assert load(**evaluated).reward_functions_judge
    length = {"function": "hybridflow.rewards:length_penalty", "arguments": {"best": 1, "most": 2}}
    with pytest.raises(ValueError, match=r"needs metrics\.eval_reward"):
        load(**evaluated, reward={"functions": [length]})
    assert not load(**evaluated, **{"metrics.eval_reward": "m:f"}).reward_functions_judge


def test_a_minimal_config_gets_the_defaults(config_file) -> None:
    config = ExperimentConfig.from_yaml(config_file())
    assert config.seed == 0
    assert load(seed=2**63 - 1, name="n" * 232).seed == 2**63 - 1
    assert config.data.prompt_key == "prompt"
    assert config.actor.optimizer.lr == 1e-5
    assert config.actor.optimizer.betas == (0.9, 0.95)
    assert config.algorithm.name == "ppo" and config.algorithm.policy.clip_range == 0.2
    assert config.algorithm.kl.estimator == "k1"
    assert config.metrics.csv
    assert config.max_sequence_length == 150
    assert config.rollout_tensor_parallel_size == 1
    assert config.run_dir == Path("runs/run-1")


def test_a_config_is_frozen() -> None:
    config = load()
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3
    with pytest.raises(ValueError, match="frozen"):
        config.actor.optimizer.lr = 3.0


def test_the_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    config = load(
        **{
            "reward.models": REWARD_MODELS,
            "sampling.logit_bias": {5: -1.5, 7: 2.0},
            "sampling.stop": ["\n", "#"],
            "sampling.allowed_token_ids": [1, 2],
            "actor.optimizer.lr": 1e-7,
            "algorithm.policy.kind": "dual_clip",
            "algorithm.policy.dual_clip": 3.0,
        }
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert ExperimentConfig.from_yaml(path) == config


def test_roles_are_named_as_in_the_file() -> None:
    config = load(**{"reward.models": REWARD_MODELS})
    assert list(config.roles()) == ["actor", "critic", "reference", "reward.models.0", "reward.models.1"]
    assert config.roles()["reward.models.1"].model == "models/b"


def test_yamls_numbers_without_a_point_are_numbers(config_file) -> None:
    text = yaml.safe_dump(MINIMAL).replace("lr: 1.0e-05", "lr: 1e-5")
    assert "lr: 1e-5" in text
    assert ExperimentConfig.from_yaml(config_file(text)).actor.optimizer.lr == 1e-5


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "is not YAML"),
        ("- a\n- b\n", "a config is a mapping of sections, this is list"),
        ("just a text", "this is str"),
        ("# nothing\n", "this is NoneType"),
    ],
)
def test_a_file_that_is_no_config_is_an_error(config_file, text: str, expected: str) -> None:
    path = config_file(text)
    message = problem(path)
    assert str(path) in message
    assert expected in message


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert "absent.yaml: cannot be read: No such file" in problem(tmp_path / "absent.yaml")
    assert "cannot be read: Is a directory" in problem(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"name: \xff\xfe")
    assert "binary.yaml: is not YAML" in problem(tmp_path / "binary.yaml")


# ------------------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("algorithm.clip_rang", "policy.clip_range"),
        ("algorithm.policy.clip_rang", "clip_range"),
        ("algorithm.kl.coeff", "coef"),
        ("actor.optimizer.learning", None),
        ("actor.optimiser", "optimizer"),
        ("actor.tensor_parallel", "tensor_parallel_size"),
        ("data.max_prompt_len", "max_prompt_length"),
        ("sampling.temprature", "temperature"),
        ("metric", "metrics"),
        ("rollout.kv_cache_gb", "kv_cache_gib"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(config_file, key: str, nearest: str | None) -> None:
    path = config_file({key: 1})
    (line,) = [line for line in problem(path).splitlines() if "unknown key" in line]
    hint = f"did you mean {nearest}?" if nearest else "known are name, lr, min_lr"
    assert line.startswith(f"{path}: {key}: unknown key; {hint}")


def test_an_unknown_key_in_a_list_names_its_place(config_file) -> None:
    path = config_file({"reward.models": [{"model": "a"}, {"model": "b", "wieght": 2}]})
    assert f"{path}: reward.models.1.wieght: unknown key; did you mean weight?" in problem(path)


@pytest.mark.parametrize("section", ["data", "actor", "name", "num_iterations"])
def test_a_missing_section_is_named(config_file, section: str) -> None:
    text = yaml.safe_dump({key: value for key, value in MINIMAL.items() if key != section})
    assert f"{section}: is required" in problem(config_file(text))


def test_a_missing_field_is_named(config_file) -> None:
    path = config_file({"actor": {"optimizer": {}}})
    assert problem(path).splitlines() == [
        f"{path}: actor.model: is required",
        f"{path}: actor.optimizer.lr: is required",
    ]


def test_every_problem_is_told_at_once(config_file) -> None:
    path = config_file({"algorithm.gamma": 2, "sampling.top_p": 0, "seeed": 1})
    message = problem(path)
    assert len(message.splitlines()) == 3
    assert all(line.startswith(f"{path}: ") for line in message.splitlines())
    for key in ("algorithm.gamma = 2", "sampling.top_p = 0", "seeed: unknown key; did you mean seed?"):
        assert key in message


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("num_iterations", 0, "greater than 0"),
        ("num_iterations", 1.5, "integer"),
        ("seed", -1, "greater than or equal to 0"),
        ("name", "a/b", "pattern"),
        ("name", "", "pattern"),
        ("seed", 2**63, "below 2**63"),
        ("name", "é" * 117, "234 bytes are too long for a file's name: at most 232"),
        ("actor.model", "models/" + "m" * 256, "at most 255"),
        ("data.train", "t" * 256, "at most 255"),
        ("data.heldout", ["t" * 256], "at most 255"),
        ("data.prompts_per_iteration", "many", "integer"),
        ("data.overlong_prompts", "truncate", "'drop' or 'error'"),
        ("sampling.temperature", 0, "greater than 0"),
        ("sampling.top_p", 1.1, "less than or equal to 1"),
        ("sampling.presence_penalty", 3, "less than or equal to 2"),
        ("actor.dtype", "float16", "'float32' or 'bfloat16'"),
        ("actor.pipeline_parallel_size", 0, "greater than 0"),
        ("rollout.pipeline_parallel_size", 0, "greater than 0"),
        ("actor.optimizer.name", "lion", "'adam' or 'sgd'"),
        ("actor.optimizer.lr", -1e-5, "greater than or equal to 0"),
        ("actor.optimizer.lr", float("nan"), "finite"),
        ("actor.optimizer.lr", float("inf"), "finite"),
        ("actor.optimizer.schedule", "cosin", "'constant', 'linear' or 'cosine'"),
        ("algorithm.gamma", 1.5, "less than or equal to 1"),
        ("algorithm.policy.clip_range", 0, "greater than 0"),
        ("algorithm.policy.dual_clip", 1.0, "greater than 1"),
        ("algorithm.kl.estimator", "k4", "'k1', 'k2', 'k3' or 'k3+'"),
        ("algorithm.update.epochs", 0, "greater than 0"),
        ("reward.normalization", "z", "'none', 'batch' or 'running'"),
        ("metrics.csv", "maybe", "boolean"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_rule(config_file, key: str, value: Any, rule: str) -> None:
    path = config_file({key: value})
    (line,) = problem(path).splitlines()
    assert line.startswith(f"{path}: {key} = {value!r}: ")
    assert rule in line


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (True, "True is none of these: none, selective, full, or a list of core_attn, layernorm, mlp, moe, moe_act"),
        ("some", "'some' is none of these: none, selective, full, or a list of core_attn"),
        ("moe_act", "'moe_act' is the name of a module: recompute takes none, selective, full, or a list of"),
        ([], "[] names no module: give some of core_attn, layernorm"),
        (["core_attn", "attn"], "['core_attn', 'attn']: 'attn' is none of the modules core_attn, layernorm"),
        (["mlp", "core_attn", "mlp"], "['mlp', 'core_attn', 'mlp']: mlp stands in it more than once"),
    ],
)
def test_what_is_computed_again_is_an_amount_or_a_list_of_modules(config_file, value: Any, rule: str) -> None:
    assert f"actor.recompute: {rule}" in problem(config_file({"actor.recompute": value}))


def test_the_order_of_modules_does_not_matter(config_file) -> None:
    for given in ("[moe_act, core_attn, layernorm]", "[layernorm,core_attn,moe_act]"):
        config = ExperimentConfig.from_yaml(config_file({}), [f"actor.recompute={given}"])
        assert config.actor.recompute == ("core_attn", "layernorm", "moe_act")
        assert config.model_dump(mode="json")["actor"]["recompute"] == ["core_attn", "layernorm", "moe_act"]


@pytest.mark.parametrize("function", ["exact_match", "a.b", "a.b:", ":f", "a-b:f", "a.b:c.d"])
def test_a_reward_function_is_module_and_name(config_file, function: str) -> None:
    path = config_file({"reward.functions": [{"function": function}]})
    assert f"{path}: reward.functions.0.function = {function!r}: " in problem(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"algorithm.update.mini_batch_size": 5},
            [
                "algorithm.update.mini_batch_size = 5 does not divide",
                "data.prompts_per_iteration x sampling.samples_per_prompt = 8 x 2 = 16",
            ],
        ),
        (
            {"algorithm.update.mini_batch_size": 32},
            ["algorithm.update.mini_batch_size = 32 does not divide", "8 x 2 = 16"],
        ),
        (
            {"critic.micro_batch_tokens": 149},
            [
                "critic.micro_batch_tokens = 149 cannot hold one sequence",
                "data.max_prompt_length + sampling.max_response_length = 150",
            ],
        ),
        (
            {"reward.models": [{"model": "a", "micro_batch_tokens": 100}]},
            ["reward.models.0.micro_batch_tokens = 100 cannot hold"],
        ),
        (
            {"sampling.min_response_length": 51},
            ["sampling: min_response_length = 51 exceeds max_response_length = 50"],
        ),
        (
            {"actor.optimizer.min_lr": 0.1},
            ["actor.optimizer: min_lr = 0.1 exceeds lr = 1e-05"],
        ),
        (
            {"actor.sequence_parallel": True},
            ["actor: sequence_parallel = true cannot go with tensor_parallel_size = 1"],
        ),
        (
            {"actor.tensor_parallel_size": 2, "actor.expert_parallel_size": 3},
            ["actor: expert_tensor_parallel_size x expert_parallel_size = 1 x 3 = 3 must be a multiple of "],
        ),
        (
            {"actor.token_dispatcher": "deepep"},
            ["actor: token_dispatcher = deepep needs experts that replicas share", "= 1 x 1 is no more than"],
        ),
        (
            {
                "actor.token_dispatcher": "deepep",
                "actor.expert_parallel_size": 2,
                "actor.expert_tensor_parallel_size": 2,
            },
            ["actor: token_dispatcher = deepep needs whole experts, expert_tensor_parallel_size is 2"],
        ),
        (
            {"actor.token_dispatcher": "deepep", "actor.expert_parallel_size": 2, "actor.dtype": "float32"},
            ["actor: token_dispatcher = deepep cannot go with dtype = float32"],
        ),
        (
            {"actor.token_dispatcher": "flex"},
            ["actor.token_dispatcher", "'auto', 'alltoall' or 'deepep'"],
        ),
        (
            {"actor.tensor_parallel_size": 2, "actor.expert_parallel_size": 4},
            [
                "actor: expert_tensor_parallel_size x expert_parallel_size = 1 x 4 exceeds",
                "actor.sequence_parallel=true",
            ],
        ),
        (
            {"reward": {}},
            ["reward: names neither a model nor a function", "reward.models or reward.functions"],
        ),
        (
            {"algorithm.kl.use": "none", "algorithm.kl.controller": "adaptive"},
            ["algorithm.kl: ", "algorithm.kl: use = none cannot go with controller = adaptive"],
        ),
        (
            {"critic.virtual_pipeline_parallel_size": 2},
            ["critic: virtual_pipeline_parallel_size = 2 cannot go with pipeline_parallel_size = 1"],
        ),
        (
            {"actor.num_layers_in_last_pipeline_stage": 1},
            ["actor: num_layers_in_last_pipeline_stage = 1 cannot go with pipeline_parallel_size = 1"],
        ),
        (
            {"actor.ranks": [0, 8]},
            ['actor.ranks: [0, 8] is now written "0-7"'],
        ),
        (
            {"actor.ranks": [[0, 2], [3]]},
            ["actor.ranks: [[0, 2], [3]]: ranks are inclusive intervals and single ranks, ascending, each once"],
        ),
        (
            {"rollout.ranks": "0-3,x"},
            ["rollout.ranks: '0-3,x': 'x' is no rank and no interval; ranks are inclusive intervals"],
        ),
        (
            {"metrics.eval_interval": 5},
            ["metrics.eval_interval = 5 cannot go with data.heldout = null"],
        ),
        (
            {"metrics.eval_interval": 5, "data.heldout": "heldout.jsonl", "reward": {"models": REWARD_MODELS}},
            ["metrics.eval_interval = 5 needs metrics.eval_reward, data.environment, or functions in reward"],
        ),
        (
            {"data.heldout": {"a": {"files": "a.jsonl", "interval": 5}}},
            ["data.heldout.a.interval = 5 needs metrics.eval_interval, which is 0"],
        ),
        (
            {
                "metrics": {"eval_interval": 5, "eval_reward": "m:f"},
                "data.heldout": {"a": {"files": "a.jsonl", "interval": 10}, "b": {"files": "b.jsonl", "interval": 7}},
            },
            ["data.heldout.b.interval = 7: is no multiple of metrics.eval_interval = 5"],
        ),
    ],
)
def test_fields_that_do_not_agree_are_errors_that_show_the_arithmetic(
    config_file, changes: dict[str, Any], expected: list[str]
) -> None:
    path = config_file(changes)
    (line,) = problem(path).splitlines()
    for part in [f"{path}: ", *expected]:
        assert part in line


# ------------------------------------------------------------------------------------------------ world size


def test_a_world_that_every_role_fills_is_accepted() -> None:
    sizes = {"actor.tensor_parallel_size": 2, "critic.data_parallel_size": 4}
    config = load(**sizes, **{"algorithm.update.mini_batch_size": 16})
    config.check_world_size(4)
    everywhere = (0, 1, 2, 3)
    assert config.actor.layout("actor", 4) == Layout(tp=2, pp=1, dp=2, ranks=everywhere)
    assert config.critic.layout("critic", 4) == Layout(tp=1, pp=1, dp=4, ranks=everywhere)
    assert config.reference.layout("reference", 4) == Layout(tp=1, pp=1, dp=4, ranks=everywhere)
    assert config.rollout_tensor_parallel_size == 2
    assert config.rollout_ranks(4) == everywhere


def test_roles_on_ranks_of_their_own_are_accepted() -> None:
    config = load(
        **{
            "actor.ranks": "0-3",
            "actor.pipeline_parallel_size": 2,
            "actor.virtual_pipeline_parallel_size": 3,
            "actor.num_layers_in_first_pipeline_stage": 3,
            "critic.ranks": "4,6",
            "critic.tensor_parallel_size": 2,
            "reference.ranks": "5,7",
            "rollout.ranks": "8-11",
            "rollout.tensor_parallel_size": 2,
            "rollout.pipeline_parallel_size": 2,
        }
    )
    config.check_world_size(12)
    assert config.actor.layout("actor", 12) == Layout(tp=1, pp=2, dp=2, ranks=(0, 1, 2, 3), vpp=3, first_stage_layers=3)
    assert config.critic.layout("critic", 12) == Layout(tp=2, pp=1, dp=1, ranks=(4, 6))
    assert config.reference.layout("reference", 12) == Layout(tp=1, pp=1, dp=2, ranks=(5, 7))
    assert config.rollout_ranks(12) == (8, 9, 10, 11)


def test_the_engine_runs_on_the_actors_ranks_unless_it_has_its_own() -> None:
    assert load(**{"actor.ranks": "2-4"}).rollout_ranks(8) == (2, 3, 4)


@pytest.mark.parametrize(
    ("changes", "world_size", "expected"),
    [
        (
            {"critic.tensor_parallel_size": 4, "algorithm.update.mini_batch_size": 8},
            6,
            "critic: tensor_parallel_size x pipeline_parallel_size = 4 x 1 = 4 does not divide the 6 ranks of the "
            "run: 6 = 1 x 4 + 2. Set critic.tensor_parallel_size=1, 2, 3 or 6, or take a multiple of 4 ranks",
        ),
        (
            {
                "critic.tensor_parallel_size": 2,
                "critic.pipeline_parallel_size": 2,
                "algorithm.update.mini_batch_size": 8,
            },
            6,
            "critic: tensor_parallel_size x pipeline_parallel_size = 2 x 2 = 4 does not divide the 6 ranks of the "
            "run: 6 = 1 x 4 + 2. Set critic.tensor_parallel_size=1 or 3, or critic.pipeline_parallel_size=1 or 3, or "
            "take a multiple of 4 ranks",
        ),
        (
            {"reference.tensor_parallel_size": 2, "reference.data_parallel_size": 3},
            4,
            "reference: tensor_parallel_size x pipeline_parallel_size x data_parallel_size = 2 x 1 x 3 = 6, but there "
            "are 4 ranks of the run. Set reference.data_parallel_size=2 or null, or take 6 ranks",
        ),
        (
            {"reference.tensor_parallel_size": 3, "reference.data_parallel_size": 2},
            4,
            "reference: tensor_parallel_size x pipeline_parallel_size x data_parallel_size = 3 x 1 x 2 = 6, but there "
            "are 4 ranks of the run. Set reference.tensor_parallel_size=4 reference.data_parallel_size=null, or take "
            "6 ranks",
        ),
        (
            {"reference.tensor_parallel_size": 3, "reference.pipeline_parallel_size": 3},
            4,
            "reference: tensor_parallel_size x pipeline_parallel_size = 3 x 3 = 9 does not divide the 4 ranks of the "
            "run: 4 = 0 x 9 + 4. Set reference.tensor_parallel_size=1 reference.pipeline_parallel_size=1, or take a "
            "multiple of 9 ranks",
        ),
        (
            {"actor.data_parallel_size": 1},
            2,
            "actor: tensor_parallel_size x pipeline_parallel_size x data_parallel_size = 1 x 1 x 1 = 1, but there are "
            "2 ranks of the run. Set actor.data_parallel_size=2 or null, or take 1 rank",
        ),
        (
            {"critic.expert_parallel_size": 4, "algorithm.update.mini_batch_size": 8},
            6,
            "critic: one copy of the experts takes expert_tensor_parallel_size x expert_parallel_size = 1 x 4 ranks, "
            "which are 4 data-parallel replicas with tensor_parallel_size = 1. There are 6 data-parallel replicas, no "
            "multiple of 4. Set critic.expert_parallel_size=1 or 2, or take a multiple of 4 ranks",
        ),
        (
            {"reward.models": [{"model": "a", "tensor_parallel_size": 2}]},
            3,
            "reward.models.0: tensor_parallel_size x pipeline_parallel_size = 2 x 1 = 2 does not divide the 3 ranks "
            "of the run: 3 = 1 x 2 + 1. Set reward.models.0.tensor_parallel_size=1 or 3, or take a multiple of 2 ranks",
        ),
        (
            {"critic.ranks": "0-2", "critic.tensor_parallel_size": 2},
            4,
            "critic: tensor_parallel_size x pipeline_parallel_size = 2 x 1 = 2 does not divide the 3 ranks of "
            "critic.ranks = 0-2: 3 = 1 x 2 + 1. Set critic.tensor_parallel_size=1 or 3, or take a multiple of 2 ranks",
        ),
        (
            {},
            8,
            "algorithm.update.mini_batch_size = 4 leaves replicas of actor without a sequence: actor has "
            "data_parallel_size 8 on 8 ranks. Set algorithm.update.mini_batch_size=8\n"
            "algorithm.update.mini_batch_size = 4 leaves replicas of critic without a sequence: critic has "
            "data_parallel_size 8 on 8 ranks. Set algorithm.update.mini_batch_size=8",
        ),
        (
            {"critic.ranks": "2-4"},
            4,
            "critic.ranks = 2-4 names rank 4, the run has 4 ranks. Set critic.ranks=0-3",
        ),
        (
            {"rollout.ranks": "4-5"},
            4,
            "rollout.ranks = 4-5 names rank 5, the run has 4 ranks. Set rollout.ranks=0-3",
        ),
        (
            {"actor.ranks": "0-2", "critic.ranks": "2-3"},
            4,
            "actor.ranks = 0-2 and critic.ranks = 2-3 overlap in 2 only. Two roles must lie on the same ranks, on "
            "different ranks, or one within the other. Otherwise each waits for the other. Set actor.ranks=0-3, or "
            "critic.ranks=0-3",
        ),
        (
            {"actor.ranks": "0-1", "critic.ranks": 0, "reference.ranks": "0-1"},
            4,
            "of the 4 ranks of the run nothing uses 2-3, which leaves 2 ranks idle: actor.ranks = 0-1, "
            "critic.ranks = 0, reference.ranks = 0-1, rollout.ranks = 0-1. Set actor.ranks=0-3, or "
            "reference.ranks=0-3, or rollout.ranks=0-3, or take 2 ranks",
        ),
        (
            {"actor.ranks": "0-2", "rollout.ranks": "2-3"},
            4,
            "rollout.ranks = 2-3 and actor.ranks = 0-2 share 2: the engine must have exactly the actor's "
            "ranks, or none of them. Set rollout.ranks=0-2",
        ),
        (
            {"rollout.tensor_parallel_size": 2, "rollout.pipeline_parallel_size": 3},
            4,
            "rollout.tensor_parallel_size x rollout.pipeline_parallel_size = 2 x 3 = 6 does not divide the 4 ranks of "
            "the engine: 4 = 0 x 6 + 4. Set rollout.pipeline_parallel_size=1 or 2",
        ),
        (
            {
                "actor.ranks": "0-3",
                "rollout.ranks": "4-6",
                "rollout.tensor_parallel_size": 2,
                "algorithm.update.mini_batch_size": 8,
            },
            7,
            "rollout.tensor_parallel_size x rollout.pipeline_parallel_size = 2 x 1 = 2 does not divide the 3 ranks of "
            "the engine: 3 = 1 x 2 + 1. Set rollout.tensor_parallel_size=1 or 3",
        ),
    ],
)
def test_a_world_that_does_not_fit_is_an_error_that_shows_the_arithmetic(
    changes: dict[str, Any], world_size: int, expected: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(**changes).check_world_size(world_size)
    assert str(raised.value) == expected


# ------------------------------------------------------------------------------------------------ overrides


def value_at(config: ExperimentConfig, path: str) -> Any:
    node: Any = config
    for key in path.split("."):
        node = node[int(key)] if key.isdigit() else getattr(node, key)
    return node


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=3", 3),
        ("actor.optimizer.lr=1e-5", 1e-5),
        ("actor.optimizer.lr=3", 3.0),
        ("actor.optimizer.betas=[0.9, 0.99]", (0.9, 0.99)),
        ("algorithm.kl.coef=0", 0.0),
        ("algorithm.kl={coef: 0.2, estimator: k3}", 0.2),
        ("data.heldout=a=b.jsonl", "a=b.jsonl"),
        ("data.heldout=null", None),
        ("data.heldout=", None),
        ("metrics.csv=false", False),
        ("sampling.stop=[a, b]", ("a", "b")),
        ("sampling.stop.0=a", ("a",)),
        ("reward.models.0.weight=2", 2.0),
        ("reward.models.1.model=models/c", "models/c"),
        ("rollout.enforce_eager=true", True),
        (" seed =4", 4),
    ],
)
def test_an_override_sets_one_key(config_file, override: str, expected: Any) -> None:
    path = config_file({"reward.models": REWARD_MODELS})
    config = ExperimentConfig.from_yaml(path, [override])
    key = override.partition("=")[0].strip()
    if override.startswith("algorithm.kl={"):
        key = "algorithm.kl.coef"
    found = value_at(config, key)
    found = found if not override.startswith("sampling.stop.0") else (found,)
    assert found == expected
    assert type(found) is type(expected)


def test_overrides_apply_in_order_and_leave_the_rest(config_file) -> None:
    path = config_file({"reward.models": REWARD_MODELS})
    config = ExperimentConfig.from_yaml(path, ["seed=1", "reward.models.0.weight=2", "seed=2"])
    expected = load(**{"seed": 2, "reward.models": [{"model": "models/a", "weight": 2.0}, REWARD_MODELS[1]]})
    assert config == expected


def test_an_override_fills_an_empty_section(config_file) -> None:
    text = yaml.safe_dump(MINIMAL) + "rollout:\n"
    config = ExperimentConfig.from_yaml(config_file(text), ["rollout.max_num_seqs=8"])
    assert config.rollout.max_num_seqs == 8


def test_an_override_may_add_an_entry_to_a_list(config_file) -> None:
    path = config_file({"reward.models": REWARD_MODELS})
    config = ExperimentConfig.from_yaml(path, ["reward.models.2.model=models/c"])
    assert [model.model for model in config.reward.models] == ["models/a", "models/b", "models/c"]
    config = ExperimentConfig.from_yaml(config_file(), ["reward.models.0.model=models/c"])
    assert [model.model for model in config.reward.models] == ["models/c"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("actor..lr=3", "expected section.key=value"),
        (".seed=3", "expected section.key=value"),
        ("seed=[1", "the value is not YAML"),
        ("reward.models.5.weight=2", "'5' is no index of a list of 2"),
        ("reward.models.first.weight=2", "'first' is no index of a list of 2"),
        ("reward.models.weight=2", "'weight' is no index of a list of 2"),
        ("reward.models.-1.weight=2", "'-1' is no index of a list of 2"),
        ("num_iterations.x=2", "'num_iterations' is 10, not a section"),
        ("actor.model.x.y=2", "'model' is 'models/policy', not a section"),
        ("sampling.stop.0.x=2", "'0' is 'end', not a section"),
        ("sampling.stop.0.x.y=2", "'0' is 'end', not a section"),
    ],
)
def test_a_bad_override_is_an_error_that_quotes_it(config_file, override: str, expected: str) -> None:
    path = config_file({"reward.models": REWARD_MODELS, "sampling.stop": ["end"]})
    message = problem(path, override)
    assert message.startswith(f"override {override!r}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("num_iterations=ten", "num_iterations = 'ten': "),
        ("algorithm.clip_rang=0.1", "algorithm.clip_rang: unknown key; did you mean policy.clip_range?"),
        ("algorithms.clip_range=0.1", "algorithms: unknown key; did you mean algorithm?"),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr = 'fast': "),
        ("actor.optimizer.lr=.inf", "actor.optimizer.lr = inf: "),
        ("metrics.csv=", "metrics.csv = None: "),
        ("reward.models.0.wieght=1", "reward.models.0.wieght: unknown key; did you mean weight?"),
    ],
)
def test_an_override_is_checked_like_the_file(config_file, override: str, expected: str) -> None:
    path = config_file({"reward.models": REWARD_MODELS})
    assert f"{path}: {expected}" in problem(path, override)


# ------------------------------------------------------------------------------------------------ shipped files


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_config_loads(path: Path) -> None:
    config = load_config(path)
    assert type(config).model_validate(yaml.safe_load(config.to_yaml())) == config


def test_shipped_configs_have_names_of_their_own() -> None:
    """Two of one name would write into one run directory."""
    names = [load_config(path).name for path in SHIPPED]
    assert len(set(names)) == len(names)


def test_the_quickstart_is_among_the_shipped_configs() -> None:
    assert ROOT / "configs" / "quickstart.yaml" in SHIPPED


# ------------------------------------------------------------------------------------------------ algorithms


def test_a_config_of_before_there_were_names_means_ppo(config_file) -> None:
    """Its flat keys are where they belong now; nothing else differs from the config written today."""
    old = {"clip_range": 0.1, "clip_range_high": 0.3, "dual_clip": 4.0, "entropy_coef": 0.01, "importance_cap": 2.0}
    old |= {"ppo_epochs": 3, "mini_batch_size": 8, "gamma": 0.9, "kl": {"coef": 0.2}}
    policy = {"kind": "dual_clip", "clip_range": 0.1, "clip_range_high": 0.3, "dual_clip": 4.0, "entropy_coef": 0.01}
    new = {"name": "ppo", "policy": policy | {"importance_cap": 2.0}, "update": {"epochs": 3, "mini_batch_size": 8}}
    new |= {"gamma": 0.9, "kl": {"coef": 0.2}}
    assert load(algorithm=old) == load(algorithm=new)
    assert load(algorithm={"dual_clip": None}).algorithm.policy.kind == "clip"
    resolved = load(algorithm=old)
    assert ExperimentConfig.model_validate(yaml.safe_load(resolved.to_yaml())) == resolved


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"algorithm": {"name": "pppo"}}, "algorithm.name = 'pppo': is no algorithm; did you mean ppo?"),
        ({"algorithm": {"name": "GRPO"}}, "algorithm.name = 'GRPO': is no algorithm; did you mean grpo?"),
        (
            {"algorithm": {"name": "zzz"}},
            "known are ppo, grpo, dr_grpo, rloo, remax, reinforce, opo, maxrl, distill, custom",
        ),
        (
            {"algorithm": {"name": "ppo", "mini_batch_size": 4}},
            "algorithm.mini_batch_size: unknown key; it is now algorithm.update.mini_batch_size",
        ),
        (
            {"algorithm": {"ppo_epochs": 2, "update": {"epochs": 3}}},
            "algorithm: ppo_epochs is now update.epochs, which is given too",
        ),
        ({"algorithm": {"name": "grpo", "gamma": 1.0}}, "algorithm.gamma: unknown key"),
        ({"algorithm.policy.dual_clip": 3.0}, "algorithm.policy: dual_clip = 3.0 cannot go with kind = clip"),
        ({"algorithm": {"name": "grpo", "kl": {"use": "reward"}}}, "algorithm.kl.use = 'reward': input should be"),
        ({"critic": None}, "critic: is required by algorithm ppo: add the section critic"),
        ({"reward": None}, "reward: is required by algorithm ppo: add the section reward"),
        ({"reference": None}, "reference: is required by ppo with algorithm.kl.use = reward: add the section"),
        (
            {"algorithm.kl.use": "none"},
            "reference: ppo with algorithm.kl.use = none has none: remove the section reference, or set reference=null",
        ),
        (
            {"algorithm": {"name": "grpo"}},
            "critic: algorithm grpo has none: remove the section critic, or set critic=null",
        ),
        (
            {"algorithm.update": {"whole_prompts": True, "mini_batch_size": 1}},
            "algorithm.update.mini_batch_size = 1 is no multiple of sampling.samples_per_prompt = 2",
        ),
        (
            {"algorithm": {"name": "grpo"}, "critic": None, "sampling.samples_per_prompt": 1},
            "sampling.samples_per_prompt = 1 cannot go with algorithm.name = grpo",
        ),
        (
            {"algorithm": {"name": "custom", "flow": "a:b", "roles": ["critic"]}},
            "roles = ['critic'] leaves out actor, which generates",
        ),
        (
            {"algorithm": {"name": "custom", "flow": "a:b", "roles": ["actor"], "kl": {"use": "loss"}}},
            "kl.use = loss needs a reference",
        ),
        ({"algorithm": {"name": "custom", "flow": "a.b", "roles": ["actor"]}}, "algorithm.flow = 'a.b'"),
        *(
            (
                {"algorithm.policy.importance_cap": 2.0, f"sampling.{key}": value},
                f"algorithm.policy.importance.kind = token cannot go with sampling.{key} = {as_flow(value)}",
            )
            for key, value in {
                "top_p": 0.9,
                "top_k": 5,
                "min_p": 0.1,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "repetition_penalty": 1.1,
                "bad_words": ("x",),
                "logit_bias": {3: 1.0},
            }.items()
        ),
    ],
)
def test_an_algorithm_and_its_sections_are_checked_both_ways(changes, expected, config_file) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        ExperimentConfig.from_yaml(config_file(changes))


WITHOUT: dict[str, Any] = {"critic": None, "reference": None}
GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "maxrl")


def algorithm(name: str, **more: Any) -> Any:
    """The section of an algorithm without a critic, of a config with the roles that it has."""
    needs = ALGORITHMS[name].model_validate({"name": name, **more}).needs()
    roles = {role: None for role in ("critic", "reference", "reward") if role not in needs}
    return load(algorithm={"name": name, **more}, **roles).algorithm


def test_each_algorithm_has_the_defaults_of_its_paper() -> None:
    means = {name: algorithm(name).policy.loss_mean for name in ALGORITHMS if name not in ("ppo", "custom")}
    sums = dict.fromkeys(("rloo", "remax", "opo", "maxrl"), "sequence_sum_mean")
    others = {"grpo": "sequence_token_mean", "dr_grpo": "constant", "reinforce": "token_mean", "distill": "token_mean"}
    assert means == others | sums
    kinds = {name: algorithm(name).policy.kind for name in means}
    assert kinds == {name: "reinforce" if name in (*sums, "distill") else "clip" for name in means}
    uses = {name: (algorithm(name).kl.use, algorithm(name).kl.estimator) for name in means}
    in_reward, nowhere = ("reward", "k1"), ("none", "k3")
    assert uses == {
        "grpo": ("loss", "k3"),
        **dict.fromkeys(("rloo", "remax", "reinforce"), in_reward),
        **dict.fromkeys(("dr_grpo", "opo", "maxrl"), nowhere),
        "distill": ("none", "k1"),
    }
    group = algorithm("reinforce", baseline="group")
    assert (group.kl.use, group.kl.estimator, group.kl.coef) == ("loss", "k2", 0.01)
    assert algorithm("reinforce", baseline="group", kl={"coef": 0.5}).kl.estimator == "k2"


def test_a_policy_loss_has_the_ranges_of_its_paper() -> None:
    ranges = {}
    for kind, mean in {"clip": "token_mean", "gspo": "sequence_token_mean", "cispo": "token_mean"}.items():
        policy = algorithm("grpo", policy={"kind": kind, "loss_mean": mean}).policy
        ranges[kind] = (policy.clip_range, policy.clip_range_high)
    assert ranges == {"clip": (0.2, None), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
    given = algorithm("grpo", policy={"kind": "gspo", "clip_range": 0.1, "clip_range_high": 0.3}).policy
    assert (given.clip_range, given.clip_range_high) == (0.1, 0.3)


@pytest.mark.parametrize(
    ("given", "cap", "low", "high"),
    [
        ({}, 2.0, None, None),
        ({"kind": "sequence", "cap": 5.0}, 5.0, None, None),
        ({"kind": "icepop"}, None, 0.5, 5.0),
        ({"kind": "geometric", "low": 0.99, "high": 1.01}, None, 0.99, 1.01),
    ],
)
def test_importance_weights_have_the_bounds_of_their_kind(given, cap, low, high) -> None:
    found = algorithm("grpo", policy={"importance": given}).policy.importance
    assert (found.cap, found.low, found.high) == (cap, low, high)


def test_an_importance_cap_is_the_cap_of_weights_by_token() -> None:
    assert algorithm("grpo", policy={"importance_cap": 3.0}) == algorithm("grpo", policy={"importance": {"cap": 3.0}})
    assert algorithm("grpo", policy={"importance_cap": None}).policy.importance is None


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "custom"])
def test_the_resolved_section_of_every_algorithm_reads_back_as_itself(name: str) -> None:
    policies: list[dict[str, Any]] = [{}, {"importance": {"kind": "icepop"}}, {"kind": "sapo", "tau_positive": 2.0}]
    policies += [{"kind": "cispo"}, {"kind": "clip", "clip_range": 0.1}, {"old_log_probs": "engine"}]
    policies += [{"kind": "gspo", "loss_mean": "sequence_token_mean"}]
    for policy in policies:
        section = ALGORITHMS[name].model_validate({"name": name, "policy": policy})
        assert ALGORITHMS[name].model_validate(section.model_dump(mode="json")) == section


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        *(
            ({"name": name}, f"sampling.samples_per_prompt = 1 cannot go with algorithm.name = {name}")
            for name in GROUPED
        ),
        (
            {"name": "reinforce", "baseline": "group"},
            "sampling.samples_per_prompt = 1 cannot go with algorithm.baseline = group",
        ),
        (
            {"name": "grpo", "policy": {"kind": "gspo", "loss_mean": "token_mean"}},
            "algorithm.policy: kind = gspo cannot go with loss_mean = token_mean",
        ),
        (
            {"name": "dr_grpo", "policy": {"kind": "gspo"}},
            "algorithm.policy: kind = gspo cannot go with loss_mean = constant",
        ),
        (
            {"name": "remax", "policy": {"kind": "gspo", "loss_mean": "sequence_token_mean"}},
            "algorithm.policy.kind = gspo cannot go with algorithm.name = remax",
        ),
        (
            {"name": "grpo", "kl": {"estimator": "k1"}},
            "algorithm.kl.use = loss cannot go with algorithm.kl.estimator = k1",
        ),
        ({"name": "rloo", "kl": {"estimator": "k3+"}}, "algorithm.kl: use = reward cannot go with estimator = k3+"),
        ({"name": "dr_grpo", "kl": {"use": "reward"}}, "algorithm.kl.use = 'reward': input should be 'loss' or 'none'"),
        (
            {"name": "reinforce", "baseline": "group", "kl": {"use": "reward"}},
            "algorithm: baseline = group cannot go with kl.use = reward",
        ),
        (
            {"name": "reinforce", "baseline": "group", "gamma": 0.9},
            "algorithm: baseline = group cannot go with gamma = 0.9",
        ),
        (
            {"name": "ppo", "positive_nll_coef": 0.1, "policy": {"loss_mean": "constant"}},
            "algorithm: positive_nll_coef = 0.1 cannot go with policy.loss_mean = constant",
        ),
        ({"name": "distill", "kl": {"use": "loss"}}, "algorithm.kl.use = 'loss': input should be 'none'"),
        ({"name": "opo", "kl": {"use": "loss"}}, "kl.use = loss: opo is exactly on-policy"),
        ({"name": "opo", "policy": {"entropy_coef": 0.1}}, "policy.entropy_coef = 0.1: opo is exactly on-policy"),
        ({"name": "opo", "update": {"epochs": 2}}, "update.epochs = 2: opo is exactly on-policy"),
        (
            {"name": "grpo", "policy": {"kind": "sapo", "clip_range": 0.1}},
            "algorithm.policy: clip_range = 0.1 cannot go with kind = sapo",
        ),
        (
            {"name": "rloo", "policy": {"clip_range_high": 0.1}},
            "algorithm.policy: clip_range_high = 0.1 cannot go with kind = reinforce",
        ),
        (
            {"name": "grpo", "policy": {"tau_negative": 1.0}},
            "algorithm.policy: tau_negative = 1.0 cannot go with kind = clip",
        ),
        (
            {"name": "grpo", "policy": {"old_log_probs": "engine", "importance": {"kind": "icepop"}}},
            "importance would count the difference twice",
        ),
        (
            {"name": "grpo", "policy": {"importance_cap": 2.0, "importance": {"kind": "icepop"}}},
            "importance_cap is now importance.cap, which is given too: leave one out",
        ),
        (
            {"name": "grpo", "policy": {"importance": {"low": 0.5}}},
            "algorithm.policy.importance: low = 0.5 cannot go with kind = token",
        ),
        (
            {"name": "grpo", "policy": {"importance": {"kind": "icepop", "cap": 2.0}}},
            "algorithm.policy.importance: cap = 2.0 cannot go with kind = icepop",
        ),
        (
            {"name": "grpo", "policy": {"importance": {"kind": "geometric", "low": 0.9}}},
            "algorithm.policy.importance: kind = geometric cannot go with high = null",
        ),
        (
            {"name": "grpo", "policy": {"importance": {"kind": "icepop", "low": 1.5}}},
            "low = 1.5, high = 5.0: low must be at most 1 and high at least 1, where engine and trainer agree",
        ),
    ],
)
def test_parts_that_make_no_sense_together_are_refused_with_the_reason(section, expected, config_file) -> None:
    tree = {"algorithm": section, "sampling.samples_per_prompt": 1 if "samples_per_prompt" in expected else 2}
    path = config_file(tree | {"critic": None})
    if "samples_per_prompt" in expected and "reference" not in ALGORITHMS[section["name"]](**section).needs():
        path = config_file(tree | WITHOUT)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        ExperimentConfig.from_yaml(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"reference.tensor_parallel_size": 2},
            "algorithm.kl.reset_reference_interval = 3 copies the actor's weights rank by rank: "
            "reference.tensor_parallel_size = 2 and actor.tensor_parallel_size = 1 must be the same",
        ),
        ({"actor.ranks": "0-1"}, "reference.ranks = None and actor.ranks = (0, 1) must be the same"),
        ({"actor.lora": {"rank": 4}}, "algorithm.kl.reset_reference_interval = 3 cannot go with actor.lora"),
        (
            {"algorithm.kl.use": "none", "reference": None},
            "algorithm.kl: use = none cannot go with reset_reference_interval = 3",
        ),
    ],
)
def test_a_reference_that_is_reset_lies_where_the_actor_does(config_file, changes, expected) -> None:
    reset = {"algorithm.kl.reset_reference_interval": 3}
    assert load(**reset).algorithm.kl.reset_reference_interval == 3
    assert expected in problem(config_file(reset | changes))


def test_opo_takes_one_step_an_iteration(config_file) -> None:
    path = config_file({"algorithm": {"name": "opo", "update": {"mini_batch_size": 8}}, **WITHOUT})
    expected = "mini_batch_size = 8: opo is exactly on-policy and takes one step with all 16 sequences of an iteration"
    assert expected in problem(path)
    assert ExperimentConfig.from_yaml(path, ["algorithm.update.mini_batch_size=16"]).mini_batch_size == 16


def test_the_buffer_before_the_limit_is_not_longer_than_it(config_file) -> None:
    path = config_file({"reward.overlong": {"buffer": 51}})
    assert "reward.overlong.buffer = 51 is longer than sampling.max_response_length = 50" in problem(path)
    assert ExperimentConfig.from_yaml(path, ["reward.overlong.buffer=50"]).reward.overlong.factor == 1.0


@pytest.mark.parametrize(("key", "value"), [("normalization", "batch"), ("truncation_penalty", 0.5)])
def test_maxrl_takes_scores_that_are_not_negative(config_file, key: str, value: Any) -> None:
    path = config_file({"algorithm": {"name": "maxrl"}, f"reward.{key}": value, **WITHOUT})
    assert f"reward.{key} = {value}: maxrl divides by the mean score of a group" in problem(path)


def test_a_temperature_that_vllm_raises_is_refused(config_file) -> None:
    rule = "0.004 is below 0.01: vLLM would sample at 0.01, and the trainer's log-probs would be of another temperature"
    assert f"sampling.temperature: {rule}" in problem(config_file({"sampling.temperature": 0.004}))
    bucket = {"sampling.by_prompt_length": [{"up_to": 3, "temperature": 0.004}]}
    assert f"sampling.by_prompt_length.0.temperature: {rule}" in problem(config_file(bucket))
    assert load(**{"sampling.temperature": 0.01}).sampling.temperature == 0.01


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_p", 0.9),
        ("min_response_length", 2),  # up to there no end token can be drawn
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("bad_words", ("no",)),
        ("allowed_token_ids", (1, 2)),
        ("logit_bias", {1: 2.0}),
    ],
)
def test_the_engines_log_probs_are_no_old_ones_where_it_samples_from_less(config_file, key: str, value: Any) -> None:
    given = list(value) if isinstance(value, tuple) else value
    path = config_file({"algorithm.policy.old_log_probs": "engine", f"sampling.{key}": given})
    assert f"algorithm.policy.old_log_probs = engine cannot go with sampling.{key} = {as_flow(value)}" in problem(path)
    path = config_file({"algorithm.policy.importance": {"kind": "token"}, f"sampling.{key}": given})
    assert f"importance.kind = token cannot go with sampling.{key} = {as_flow(value)}" in problem(path)


def test_an_algorithm_has_the_models_that_it_needs() -> None:
    assert list(load().roles()) == ["actor", "critic", "reference"]
    without = {"algorithm": {"name": "grpo", "kl": {"use": "none"}}, "critic": None, "reference": None}
    assert list(load(**without).roles()) == ["actor"]
    custom = {"name": "custom", "flow": "a:b", "roles": ["actor", "reference"], "options": {"x": [1]}}
    config = load(algorithm=custom, critic=None, reward=None)
    assert list(config.roles()) == ["actor", "reference"] and config.algorithm.options == {"x": [1]}


BUCKET = {"up_to": 8, "samples_per_prompt": 4}


@pytest.mark.parametrize(
    ("buckets", "more", "expected"),
    [
        ([{"up_to": 8}], {}, "sampling.by_prompt_length.0: replaces nothing: give one of samples_per_prompt, temp"),
        ([BUCKET, BUCKET], {}, "sampling.by_prompt_length.1.up_to = 8: buckets ascend, the one before ends at 8"),
        ([BUCKET, BUCKET | {"up_to": 4}], {}, "sampling.by_prompt_length.1.up_to = 4: buckets ascend, the one before"),
        ([{"up_to": 0, "temperature": 1}], {}, "sampling.by_prompt_length.0.up_to = 0: input should be greater than 0"),
        ([{"temperature": 1}], {}, "sampling.by_prompt_length.0.up_to: is required"),
        (
            [{"up_to": 2, "temperature": 0.0}],
            {},
            "sampling.by_prompt_length.0.temperature = 0.0: input should be greater than 0",
        ),
        (
            [{"up_to": 2, "top_p": 0.5}],
            {},
            "sampling.by_prompt_length.0.top_p: unknown key; it is one for all prompts; what may go by their length is "
            "samples_per_prompt, temperature, max_response_length",
        ),
        (
            [{"up_to": 2, "temprature": 0.5}],
            {},
            "sampling.by_prompt_length.0.temprature: unknown key; did you mean temp",
        ),
        (
            [{"up_to": 8, "max_response_length": 51}],
            {},
            "sampling.by_prompt_length.0.max_response_length = 51 exceeds sampling.max_response_length = 50",
        ),
        (
            [{"up_to": 8, "max_response_length": 3}],
            {"sampling.min_response_length": 4},
            "sampling.by_prompt_length.0.max_response_length = 3 is below sampling.min_response_length = 4",
        ),
        (
            [BUCKET | {"up_to": 1000}, BUCKET | {"up_to": 1001}],
            {},
            "sampling.by_prompt_length.1.up_to = 1001: no prompt is in this bucket, the one before ends at 1000 and",
        ),
        (
            [{"up_to": 8, "samples_per_prompt": 1}],
            {"algorithm": {"name": "grpo"}, "critic": None},
            "sampling.by_prompt_length.0.samples_per_prompt = 1 cannot go with algorithm.name = grpo",
        ),
        (
            [{"up_to": 4, "temperature": 0.5}, BUCKET],
            {"algorithm": {"name": "custom", "flow": "a:b", "roles": ["actor", "critic", "reference", "reward"]}},
            "sampling.by_prompt_length.1.samples_per_prompt = 4: a custom flow may need equal",
        ),
        (
            [BUCKET],
            {"algorithm.update.mini_batch_size": 33},
            "algorithm.update.mini_batch_size = 33 exceeds the most sequences of an iteration: "
            "data.prompts_per_iteration x the largest samples_per_prompt = 8 x 4 = 32",
        ),
        (
            [{"up_to": 8, "max_response_length": 7}],
            {"reward.overlong": {"buffer": 8}},
            "reward.overlong.buffer = 8 is longer than sampling.by_prompt_length.0.max_response_length = 7",
        ),
    ],
)
def test_buckets_of_prompt_lengths_that_cannot_be(config_file, buckets, more, expected: str) -> None:
    assert expected in problem(config_file({"sampling.by_prompt_length": buckets} | more))


def test_buckets_of_prompt_lengths(config_file) -> None:
    """The first that a prompt fits in is its own, up_to included; longer prompts have what the section says."""
    buckets = [{"up_to": 8, "max_response_length": 20, "temperature": 0.5}, {"up_to": 16, "samples_per_prompt": 4}]
    config = ExperimentConfig.from_yaml(
        config_file({"sampling.by_prompt_length": buckets, "algorithm.update.mini_batch_size": 5})
    )
    sampling, lengths = config.sampling, [1, 8, 9, 16, 17]
    assert sampling.buckets.for_lengths(lengths) == [0, 0, 1, 1, 2]
    assert sampling.samples.for_lengths(lengths) == [2, 2, 4, 4, 2] and sampling.samples.varies
    assert sampling.temperatures.for_lengths(lengths) == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert sampling.limits.for_lengths(lengths) == [20, 20, 50, 50, 50]
    assert config.batch_size == 8 * 4 and config.mini_batch_size == 5  # the most sequences
    again = ExperimentConfig.from_tree(yaml.safe_load(config.to_yaml()), "config.yaml")
    assert again == config
    assert not ExperimentConfig.from_yaml(config_file({})).sampling.samples.varies


def test_the_fewest_sequences_of_an_iteration_have_to_reach_all_replicas(config_file) -> None:
    """8 prompts x 1: an iteration of long prompts alone has no more."""
    keys = {"sampling.samples_per_prompt": 1, "sampling.by_prompt_length": [BUCKET], "algorithm.update": {}}
    config = ExperimentConfig.from_yaml(config_file(keys))
    config.check_world_size(8)
    with pytest.raises(ConfigError, match="x the smallest samples_per_prompt = 8 leaves replicas of actor without"):
        config.check_world_size(16)


def test_the_home_directory_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/homes/me")
    sources = [{"path": "~/a.jsonl", "weight": 1}, {"path": "b~.jsonl", "weight": 1}]
    config = ExperimentConfig.from_tree(
        changed({"data.train": sources, "data.heldout": "~/h.jsonl", "actor.model": "~/m", "output_dir": "~/runs"}), "x"
    )
    assert not isinstance(config.data.train, str)
    assert [source.path for source in config.data.train] == ["/homes/me/a.jsonl", "b~.jsonl"]
    assert (config.data.heldout, config.actor.model, config.output_dir) == (
        "/homes/me/h.jsonl",
        "/homes/me/m",
        "/homes/me/runs",
    )


def test_the_fewest_ranks_hold_a_copy_of_the_experts(config_file: Any) -> None:
    """Two replicas of one rank that share the experts need two ranks."""
    changes = {"actor.expert_parallel_size": 2, "algorithm.update.mini_batch_size": 8}
    assert world_size_to_try(ExperimentConfig.from_yaml(config_file(changes))) == (2, None)
