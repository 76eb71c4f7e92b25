"""The names of tutorials: what each argument becomes in the config, and what each mistake's message says."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import hybridflow
from hybridflow import RLTrainer, create_critic_model, get_trainer_config, make_rl_data_loader
from hybridflow.config import ExperimentConfig
from hybridflow.errors import ConfigError, UserError
from hybridflow.rewards.functions import exact_match
from hybridflow.trainers import tutorial_names as front
from hybridflow.trainers.online import OnlineTrainer
from hybridflow.user_code import load_function
from tests.distributed.tiny_experiment import write_config
from tests.tiny_models import make_checkpoints

SHORT = {"batch_size": 128, "rollout_len": 64, "lr": 1e-5, "epochs": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("models"), family="llama", tied=False)


def built(models: Path, **changes: Any) -> RLTrainer:
    """A trainer of directories with ppo; a change of None leaves the argument out."""
    given = {
        "actor_model": str(models / "policy"),
        "critic_model": str(models / "critic"),
        "reward_model": str(models / "reward"),
        "data_loader": "data.jsonl",
        "config": SHORT,
    }
    return RLTrainer(**{key: value for key, value in (given | changes).items() if value is not None})


def refused(models: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as raised:
        built(models, **changes)
    return str(raised.value)


def test_the_four_names_are_the_packages() -> None:
    assert issubclass(RLTrainer, OnlineTrainer)
    assert RLTrainer.from_yaml.__func__ is OnlineTrainer.from_yaml.__func__
    assert hybridflow.get_trainer_config is get_trainer_config
    with pytest.raises(AttributeError, match="no attribute 'make_data_loader'"):
        _ = hybridflow.make_data_loader


# ------------------------------------------------------------------------------------------------ what it becomes


def test_the_tutorials_call_is_this_config(models) -> None:
    """All of it, literally: what is not said is the config's default."""
    policy, critic, reward = (str(models / name) for name in ("policy", "critic", "reward"))
    layout = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "data_parallel_size": 3, "dtype": "bfloat16"}
    trained = layout | {"recompute": "full", "optimizer": {"lr": 1e-5}}
    given = get_trainer_config(dp_size=3, tp_size=4, pp_size=2, enable_recompute=True, mixed_precision="bf16")
    found = built(
        models,
        critic_model=create_critic_model(critic),
        tokenizer=AutoTokenizer.from_pretrained(policy),
        algo="ppo",
        data_loader=make_rl_data_loader("data.jsonl"),
        config=given | SHORT,
    )
    assert found.config == ExperimentConfig.model_validate(
        {
            "name": "ppo",
            "num_iterations": 1,
            "data": {"train": "data.jsonl", "max_prompt_length": 512, "prompts_per_iteration": 128},
            "sampling": {"max_response_length": 64},
            "actor": {"model": policy, **trained},
            "critic": {"model": critic, **trained},
            "reference": {"model": policy, **layout},
            "reward": {"models": [{"model": reward, **layout}]},
            "algorithm": {"name": "ppo", "update": {"epochs": 1}},
        }
    )
    found.config.check_world_size(24)
    with pytest.raises(ConfigError, match="actor"):
        found.config.check_world_size(16)


def test_a_layout_is_keys_of_every_model() -> None:
    assert get_trainer_config() == {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "recompute": "none",
        "dtype": "bfloat16",
    }
    assert get_trainer_config(tp_size=2, mixed_precision="no")["dtype"] == "float32"


def test_a_data_loader_is_the_section_data() -> None:
    assert make_rl_data_loader(
        Path("a.jsonl"), heldout="b.jsonl", batch_size=8, max_prompt_length=20, prompt_key="question"
    ) == {
        "train": "a.jsonl",
        "heldout": "b.jsonl",
        "prompts_per_iteration": 8,
        "max_prompt_length": 20,
        "prompt_key": "question",
    }


def test_each_short_name_is_its_key(models) -> None:
    short = {"mini_batch_size": 32, "epochs": 2, "temperature": 0.7, "kl_coef": 0.01, "clip_range": 0.1}
    config = built(models, config=SHORT | short | {"samples_per_prompt": 2}).config
    assert (config.data.prompts_per_iteration, config.sampling.samples_per_prompt) == (128, 2)
    assert (config.algorithm.update.mini_batch_size, config.algorithm.update.epochs) == (32, 2)
    assert (config.sampling.temperature, config.sampling.max_response_length) == (0.7, 64)
    assert (config.algorithm.kl.coef, config.algorithm.policy.clip_range) == (0.01, 0.1)
    assert (config.actor.optimizer.lr, config.critic.optimizer.lr) == (1e-5, 1e-5)


def test_a_key_of_the_config_wins_over_a_short_name_and_over_that_of_all_models(models) -> None:
    config = built(
        models,
        config=get_trainer_config(tp_size=2)
        | SHORT
        | {
            "critic.optimizer.lr": 3e-5,
            "reference.tensor_parallel_size": 1,
            "reward.models.0.weight": 0.5,
            "reward": {"clip_score": 5.0},
            "rollout": {"kv_cache_gib": 8.0},
            "sampling": {"top_p": 0.9},
            "seed": 3,
            "name": "mine",
        },
    ).config
    assert (config.actor.optimizer.lr, config.critic.optimizer.lr) == (1e-5, 3e-5)
    assert (config.actor.tensor_parallel_size, config.reference.tensor_parallel_size) == (2, 1)
    [reward] = config.reward.models
    assert (reward.weight, reward.model, reward.tensor_parallel_size) == (0.5, str(models / "reward"), 2)
    assert (config.reward.clip_score, config.rollout.kv_cache_gib, config.sampling.top_p) == (5.0, 8.0, 0.9)
    assert (config.seed, config.name, config.sampling.max_response_length) == (3, "mine", 64)


def test_an_algorithm_brings_the_models_that_it_has(models) -> None:
    grpo = {"algo": "GRPO", "critic_model": None}
    config = built(models, **grpo, config=SHORT | {"samples_per_prompt": 4}).config
    assert config.algorithm.name == "grpo" and config.critic is None
    assert config.reference.model == str(models / "policy")
    other = built(models, **grpo, config=SHORT | {"samples_per_prompt": 4}, reference_model=models / "reference").config
    assert other.reference.model == str(models / "reference")
    without = built(models, **grpo, config=SHORT | {"samples_per_prompt": 4, "algorithm.kl.use": "none"}).config
    assert without.reference is None


def test_rewards_are_models_functions_and_names(models) -> None:
    several = [str(models / "reward"), exact_match, "my_rewards:digits"]
    reward = built(models, reward_model=several).config.reward
    assert [model.model for model in reward.models] == [str(models / "reward")]
    assert [one.function for one in reward.functions] == [
        "hybridflow.rewards.functions:exact_match",
        "my_rewards:digits",
    ]
    assert built(models, reward_model=exact_match).config.reward.models == ()


def test_models_in_memory_get_directories_beside_the_run(models) -> None:
    """The critic and the reference begin with the actor's weights: one directory for the three."""
    policy = AutoModelForCausalLM.from_pretrained(models / "policy")
    scorer = AutoModelForSequenceClassification.from_pretrained(models / "reward")
    given = {
        "actor_model": policy,
        "critic_model": create_critic_model(policy),
        "reward_model": [str(models / "reward"), scorer],
        "tokenizer": models / "policy",
    }
    found = built(models, **given, config=SHORT | {"output_dir": "out", "name": "mine"})
    roles = {name: role.model for name, role in found.config.roles().items()}
    assert roles == {
        "actor": "out/.mine.models/actor",
        "critic": "out/.mine.models/actor",
        "reference": "out/.mine.models/actor",
        "reward.models.0": str(models / "reward"),
        "reward.models.1": "out/.mine.models/reward_1",
    }
    assert found._asked.in_memory(found.config) == {roles["actor"]: policy, roles["reward.models.1"]: scorer}


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"actor_model": None}, "RLTrainer: actor_model is required, or an ExperimentConfig"),
        ({"data_loader": None}, "RLTrainer: data_loader is required, or an ExperimentConfig"),
        ({"config": None}, "config: is of type NoneType; expected a mapping such as {'batch_size': 128, ...}"),
        ({"data_loader": [1]}, "data_loader: is of type list; every rank reads the file: make_rl_data_loader"),
        ({"critic_model": None}, "critic_model: is required by algo = 'ppo': critic_model=create_critic_model("),
        ({"reward_model": None}, "reward_model: is required by algo = 'ppo': reward_model=..."),
        ({"algo": "grpo"}, "critic_model: algo = 'grpo' has none: leave it out"),
        (
            {"algo": "dpo"},
            "RLTrainer: algorithm.name = 'dpo': this algorithm trains on fixed data. hybridflow.train and",
        ),
        ({"algo": "pppo"}, "RLTrainer: algorithm.name = 'pppo': is no algorithm; did you mean ppo?"),
        ({"hybrid_engine": False}, "hybrid_engine: there is no other engine: vLLM generates in the trainer's"),
        ({"strategy": "fsdp"}, "RLTrainer: strategy: unknown argument; there is none here, megatron-core trains"),
        ({"ref_model": "x"}, "RLTrainer: ref_model: unknown argument; here it is actor.model and reference.model"),
        ({"rollout_only": True}, "RLTrainer: watchdog, replay, rollout_only and source go with an ExperimentConfig"),
        ({"actor_model": "nowhere"}, "actor_model: nowhere/config.json: no such file; a model is"),
        ({"critic_model": 3}, "critic_model: is of type int; a model is a HuggingFace directory or a"),
        ({"tokenizer": 3}, "tokenizer: is of type int; expected a tokenizer of transformers"),
        ({"config": SHORT | {"rollout.n": 4}}, "rollout.n: unknown key; here it is sampling.samples_per_prompt"),
        ({"config": SHORT | {"kl_loss_coef": 4}}, "RLTrainer: kl_loss_coef: unknown key; here it is algorithm.kl.coef"),
        ({"config": SHORT | {"lr": "fast"}}, "RLTrainer: actor.optimizer.lr = 'fast': input should be a valid number"),
        ({"config": {"batch_size": 8, "lr": 0.1}}, "RLTrainer: sampling.max_response_length: is required"),
        ({"config": SHORT | {"algorithm": "ppo"}}, "RLTrainer: algorithm = 'ppo': "),
        (
            {"config": SHORT | {"reward.models.0.x": 1, "reward.models.2.y": 1}},
            "RLTrainer: '2' is no index of a list of 1",
        ),
        (
            {"config": SHORT | {"actor.model": "x"}},
            "RLTrainer: config: actor.model = 'x': the argument actor_model says",
        ),
        (
            {"config": SHORT | {"reward": {"functions": [{"function": "a:b"}]}}},
            "RLTrainer: config: reward.functions.0.function = 'a:b': the argument reward_model says it",
        ),
        ({"reward_model": 3}, "reward_model: 3 is neither a model nor a function"),
    ],
)
def test_what_does_not_hold_is_told(models, changes, expected) -> None:
    assert expected in refused(models, **changes)


def test_a_model_in_memory_needs_a_known_family_and_a_tokenizer(models) -> None:
    policy = AutoModelForCausalLM.from_pretrained(models / "policy")
    assert "tokenizer: is required where actor_model is in memory" in refused(models, actor_model=policy)
    assert "LlamaModel is not supported; known are LlamaForCausalLM" in refused(models, actor_model=policy.model)
    assert "critic_model: is of type Linear; a model is" in refused(models, critic_model=torch.nn.Linear(2, 2))


def test_another_tokenizer_than_the_directorys_is_refused(models) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "policy")
    tokenizer.pad_token = tokenizer.eos_token  # as every tutorial has it; nothing is padded here
    built(models, tokenizer=tokenizer)
    tokenizer.add_tokens(["new"])
    assert "tokenizer: is not the one in actor_model = " in refused(models, tokenizer=tokenizer)


def test_a_function_that_no_rank_can_import_is_refused(models, monkeypatch) -> None:
    def local(prompts, responses, columns):
        return [0.0] * len(prompts)

    rule = "a config names a reward function as module:function, and every rank imports it: "
    assert f"local of tests.test_front has no name of its own; {rule}make it a def of the module" in refused(
        models, reward_model=local
    ).replace("test_a_function_that_no_rank_can_import_is_refused.<locals>.", "")
    assert "<lambda> of tests.test_front has no name of its own" in refused(models, reward_model=lambda *x: x).replace(
        "test_a_function_that_no_rank_can_import_is_refused.<locals>.", ""
    )
    monkeypatch.setattr(local, "__module__", "__main__")
    monkeypatch.setattr(local, "__qualname__", "local")
    expected = f"reward_model: local is defined in the program itself; {rule}move it to a file of its own"
    assert refused(models, reward_model=local) == expected
    module = ModuleType("rewards_made_by_hand")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(local, "__module__", module.__name__)
    assert "reward function" not in refused(models, reward_model=local)
    module.local = exact_match
    assert "rewards_made_by_hand:local is another object than the one given" in refused(models, reward_model=local)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: get_trainer_config(mixed_precision="fp16"), "mixed_precision = 'fp16': bf16, or no for float32"),
        (lambda: get_trainer_config(fsdp=True), "fsdp: unknown argument; there is none here, megatron-core trains"),
        (
            lambda: get_trainer_config(sp_size=2),
            "get_trainer_config: sp_size: unknown argument; here it is actor.context_parallel_size",
        ),
        (
            lambda: get_trainer_config(size=2),
            "get_trainer_config: size: unknown argument; known are dp_size, tp_size, pp_size, enable_recompute",
        ),
        (
            lambda: make_rl_data_loader("a", max_prompt_len=3),
            "make_rl_data_loader: max_prompt_len: unknown argument; known are batch_size, train, heldout",
        ),
        (lambda: make_rl_data_loader("a", input_key="q"), "input_key: unknown argument; here it is data.prompt_key"),
        (lambda: create_critic_model(3), "create_critic_model: is of type int; a model is a HuggingFace directory"),
    ],
)
def test_what_a_helper_does_not_know_is_told(call, expected) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        call()


def test_a_trainer_of_a_config_is_the_trainer(models, tmp_path) -> None:
    """Of one rank, which has no two to split the actor over."""
    config = write_config(tmp_path / "config.yaml", models)
    with pytest.raises(ConfigError, match="tensor_parallel_size") as raised:
        RLTrainer.from_yaml(str(config))
    assert raised.traceback[-1].name == "refuse" and any(entry.name == "place" for entry in raised.traceback)
    given = ExperimentConfig.from_yaml(config)
    with pytest.raises(ConfigError, match="a config names its models, leave out actor_model, algo"):
        RLTrainer(given, actor_model="x", algo="ppo")


def test_a_runs_own_directory_is_where_it_goes_on_by_itself(tmp_path) -> None:
    run = tmp_path / "run"
    assert front._load_of(run, run) == front._load_of(tmp_path / "a" / ".." / "run" / "checkpoints", run) == "auto"
    assert front._load_of(run / "checkpoints" / "step_000002", run) == str(run / "checkpoints" / "step_000002")
    assert front._load_of(tmp_path / "other", run) == str(tmp_path / "other")


def test_a_run_directory_is_saved_into_ten_times_unless_the_config_says_otherwise(models, tmp_path) -> None:
    def fitted(num_steps: int, run_dir: Path | None, **config: Any) -> ExperimentConfig:
        made = built(models, config=SHORT | config)
        return made._experiment(made._asked, num_steps, run_dir)

    run = tmp_path / "mine"
    config = fitted(40, run)
    assert (config.run_dir, config.num_iterations, config.checkpoint.save_interval) == (run, 40, 4)
    assert fitted(3, run).checkpoint.save_interval == 1
    assert fitted(40, run, checkpoint={"save_interval": 7}).checkpoint.save_interval == 7
    assert fitted(40, run, **{"checkpoint.save_interval": 0}).checkpoint.save_interval == 0
    other = fitted(40, None, output_dir="out", name="x")
    assert (other.run_dir, other.checkpoint.save_interval) == (Path("out/x"), 0)


def test_a_checkpoint_to_go_on_from_is_checkpoint_load(models, tmp_path) -> None:
    step = tmp_path / "other" / "checkpoints" / "step_000002"
    step.mkdir(parents=True)
    made = built(models)
    made.load_checkpoint(tmp_path / "other")
    assert made._experiment(made._asked, 5, tmp_path / "mine").checkpoint.load == str(tmp_path / "other")
    assert made._experiment(made._asked, 5, tmp_path / "other").checkpoint.load == "auto"


def test_a_function_by_name_is_found_in_the_working_directory(models, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    Path("rewards_of_this_directory.py").write_text("def score(prompts, responses, columns):\n    return [1.0]\n")
    built(models, reward_model="rewards_of_this_directory:score")
    assert load_function("rewards_of_this_directory:score", "x")([], [], {}) == [1.0]


def test_a_number_of_iterations_may_stand_in_the_config(models) -> None:
    assert built(models, config=SHORT | {"num_iterations": 7}).config.num_iterations == 7


def test_fit_and_load_checkpoint_say_what_they_need(models, tmp_path) -> None:
    made = built(models)
    for call, expected in (
        (lambda: made.fit(), "fit: num_steps is required"),
        (lambda: made.fit(num_steps=0), "num_steps = 0: a run has at least one iteration"),
        (lambda: made.fit(3, num_steps=4), "fit: num_iterations = 3 and num_steps = 4 are one: give one"),
        (lambda: made.load_checkpoint(tmp_path), "is no checkpoint, which has a manifest.json, and holds none"),
        (lambda: made.fit(num_steps=1, checkpoint_dir="/"), "RLTrainer: name = ''"),
    ):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            call()
