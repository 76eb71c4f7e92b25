"""What may change between two starts of a run: every key has a rule, and the rules do what the table says."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from hybridflow.checkpoint.change_rules import TABLE, UNKNOWN, Effect
from hybridflow.checkpoint.changes import (
    FREE,
    GIVEN,
    NOTICED,
    REFUSED,
    Changes,
    changes,
    content_changes,
    flat_config,
    rule_of,
)
from hybridflow.config import ExperimentConfig, OptimizerConfig, RoleConfig
from hybridflow.config.algorithms import ALGORITHMS, Custom
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.keys import is_listed, is_named, sections_in
from hybridflow.data.digests import run_digests
from hybridflow.data.inputs import load_inputs
from hybridflow.errors import ConfigError
from hybridflow.models.optimizer import learning_rate
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.messages import like
from tests.tiny_models import VOCAB_SIZE

MODEL = {"model": "m", "micro_batch_tokens": 64}
TRAINED = {**MODEL, "optimizer": {"lr": 3e-4}}
NEXT = 13


def resolved(**given: Any) -> dict[str, Any]:
    """A whole config as it is dumped. given: sections that take the place of these."""
    tree = {
        "name": "run",
        "num_iterations": 60,
        "data": {"train": "t.jsonl", "prompts_per_iteration": 4, "max_prompt_length": 8},
        "sampling": {"max_response_length": 8, "samples_per_prompt": 2},
        "actor": TRAINED,
        "critic": TRAINED,
        "reference": MODEL,
        "reward": {"models": [MODEL], "functions": [{"function": "a.b:c"}]},
        **given,
    }
    return ExperimentConfig.model_validate(tree).model_dump(mode="json")


def with_value(key: str, value: Any, tree: dict[str, Any] | None = None) -> dict[str, Any]:
    """Another resolved config, which need not be one that can run."""
    found = copy.deepcopy(resolved() if tree is None else tree)
    *above, last = [int(part) if part.isdecimal() else part for part in key.split(".")]
    node: Any = found
    for part in above:
        node = node[part]
    node[last] = value
    return found


def found(now: dict[str, Any], saved: dict[str, Any] | None = None, *, fork: bool = False) -> Changes:
    return changes(resolved() if saved is None else saved, now, next_iteration=NEXT, fork=fork)


# ------------------------------------------------------------------------------------------------ every key


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key that a config can have: of a list of sections that of its first, of a union those of all."""
    for name, field in model.model_fields.items():
        sections = sections_in(field.annotation)
        if not sections:
            yield f"{prefix}{name}"
        for section in sections:
            index = ".0" if is_listed(section, field.annotation) else ".NAME" * is_named(section, field.annotation)
            yield from fields(section, f"{prefix}{name}{index}.")


def test_every_key_of_the_config_has_a_rule() -> None:
    keys = set(fields(ExperimentConfig))
    assert {"seed", "algorithm.flow", "algorithm.kl.coef", "reward.models.0.ranks", "critic.optimizer.eps"} <= keys
    assert len(keys) > 150
    assert [key for key in sorted(keys) if rule_of(key) is UNKNOWN] == []
    fixed = set(fields(FixedDataConfig))
    assert {"num_epochs", "algorithm.beta", "reward_model.optimizer.lr", "data.batch_size"} <= fixed
    assert [key for key in sorted(fixed) if rule_of(key) is UNKNOWN] == []


def test_every_section_that_may_be_left_out_has_a_rule() -> None:
    optional = [name for name, field in ExperimentConfig.model_fields.items() if field.default is None]
    assert optional == ["device_profile", "stop_when", "critic", "reference", "reward"]
    for name in [*optional, "reward.models.0", "reward.functions.0"]:
        assert rule_of(name) is not UNKNOWN, name


def test_a_key_that_is_added_to_the_config_lacks_a_rule() -> None:
    """Of a role, where each key has an entry of its own; sections that are alike as a whole have one entry."""

    class Grown(RoleConfig):
        novelty: int = 0

    assert [key for key in fields(Grown, "actor.") if rule_of(key) is UNKNOWN] == ["actor.novelty"]
    assert rule_of("rollout.novelty") is not UNKNOWN and rule_of("data.novelty") is UNKNOWN


def test_every_rule_is_of_a_key_that_there_is() -> None:
    keys = [*fields(ExperimentConfig), *fields(FixedDataConfig)]
    keys += ["actor.lora", "critic", "reference", "reward", "reward.models.0", "reward.functions.0", "data.environment"]
    used = {id(rule_of(key)) for key in keys}
    assert [rule.keys for rule in TABLE if id(rule) not in used] == []


# the key, another value, on resume, in a fork
EFFECTS: list[tuple[str, Any, Effect, Effect]] = [
    ("output_dir", "elsewhere", FREE, FREE),
    ("actor.tensor_parallel_size", 2, FREE, FREE),
    ("reward.models.0.ranks", "0-3", FREE, FREE),
    ("critic.offload_optimizer", True, FREE, FREE),
    ("actor.optimizer.zero1", False, FREE, FREE),
    ("rollout.max_num_seqs", 8, FREE, FREE),
    ("checkpoint.keep_last", 9, FREE, FREE),
    ("metrics.num_samples", 0, FREE, FREE),
    ("data.train", "moved/t.jsonl", FREE, FREE),
    ("data.heldout", "moved/h.jsonl", FREE, FREE),
    ("data.heldout", {"a": {"files": "moved/h.jsonl", "samples": 1}}, FREE, FREE),
    ("metrics.eval_reward", "a:b", NOTICED, NOTICED),
    ("metrics.eval_threshold", 0.5, NOTICED, NOTICED),
    ("actor.optimizer.lr", 1e-4, NOTICED, NOTICED),
    ("data.prompts_per_iteration", 8, NOTICED, NOTICED),
    ("sampling.temperature", 0.5, NOTICED, NOTICED),
    ("reward.functions.0.weight", 2.0, NOTICED, NOTICED),
    ("algorithm.policy.clip_range", 0.1, NOTICED, NOTICED),
    ("algorithm.policy.replay_routing", True, NOTICED, NOTICED),
    ("nonfinite.action", "skip", NOTICED, NOTICED),
    ("reference.model", "other", NOTICED, NOTICED),
    ("seed", 3, REFUSED, NOTICED),
    ("data.shuffle", False, REFUSED, NOTICED),
    ("data.prompt_key", "question", REFUSED, NOTICED),
    ("reward.functions.0.function", "x:y", REFUSED, NOTICED),
    ("actor.hf_overrides", {"max_position_embeddings": 64}, REFUSED, NOTICED),
    ("reward.models.0.hf_overrides", {"max_position_embeddings": 64}, REFUSED, NOTICED),
    ("actor.dtype", "float32", REFUSED, REFUSED),
    ("critic.optimizer.name", "sgd", REFUSED, REFUSED),
    ("critic", None, REFUSED, REFUSED),
    ("actor.lora", {"rank": 8}, REFUSED, REFUSED),
    ("reward.models", [], REFUSED, NOTICED),
]


@pytest.mark.parametrize(("key", "value", "resume", "fork"), EFFECTS, ids=[key for key, *_ in EFFECTS])
def test_a_key_may_change_or_not(key: str, value: Any, resume: Effect, fork: Effect) -> None:
    now = with_value(key, value)
    told = "reward.models.0" if key == "reward.models" else key  # what is gone
    for is_fork, effect in ((False, resume), (True, fork)):
        (change,) = found(now, fork=is_fork).found
        assert (change.key, change.effect) == (told, effect)
        if effect is REFUSED:
            with pytest.raises(ConfigError, match=f"{told}: .* -> "):
                found(now, fork=is_fork).refuse()
        else:
            found(now, fork=is_fork).refuse()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("rank", 16, "have the former rank"),
        ("target_modules", ["q_proj"], "belong to the former linear layers"),
        ("exclude_modules", ["o_proj"], "belong to the former linear layers"),
        ("alpha", 64.0, "trained with the former scale"),
        ("use_rslora", True, "trained with the former scale"),
        ("adapter_path", "other", "began with those of that directory"),
    ],
)
def test_what_makes_adapters_what_they_are(field: str, value: Any, why: str) -> None:
    """Neither a resumed run nor a fork changes that, of the actor or the critic."""
    lora = {"rank": 8, "alpha": 32, "target_modules": "all-linear"}
    tree = resolved(actor={**TRAINED, "lora": lora}, critic={**TRAINED, "lora": lora})
    for role in ("actor", "critic"):
        for fork in (False, True):
            refused = found(with_value(f"{role}.lora.{field}", value, tree), tree, fork=fork)
            with pytest.raises(ConfigError, match=rf"{role}.lora.{field}: .* -> .*{why}"):
                refused.refuse()
    gone = found(with_value("critic.lora", None, tree), tree)
    assert gone.lines() == [
        like(
            "critic.lora: given -> None  (may not change: with adapters a checkpoint holds the adapters alone, without "
            "adapters all weights)"
        )
    ]


# ------------------------------------------------------------------------------------------------ what is shown


def test_equal_configs_have_no_changes() -> None:
    """Also where one went through YAML, as a run directory has it, or JSON, as a checkpoint may."""
    sampling = {"max_response_length": 8, "samples_per_prompt": 2, "logit_bias": {7: 0.5}, "stop": ["a"]}
    tree = resolved(sampling=sampling, actor={**TRAINED, "ranks": "0-3"})
    for saved in (tree, yaml.safe_load(yaml.safe_dump(tree)), json.loads(json.dumps(tree))):
        assert found(tree, saved).lines() == []
    in_python = ExperimentConfig.model_validate(tree).model_dump() | {"actor": tree["actor"]}
    assert found(tree, in_python).lines() == []


def test_lines_show_both_values_and_what_it_means() -> None:
    now = resolved(
        actor={**TRAINED, "optimizer": {"lr": 1e-4}, "micro_batch_tokens": 32},
        data={"train": "t.jsonl", "prompts_per_iteration": 4, "max_prompt_length": 8, "shuffle": False},
        sampling={"max_response_length": 8, "samples_per_prompt": 2, "top_p": 0.5},
    )
    assert found(now).lines() == [
        like(
            "data.shuffle: True -> False  (may not change: the key decides the order of prompts: the saved place "
            "means another prompt)"
        ),
        like(
            "sampling.top_p: 1.0 -> 0.5  (takes effect from iteration 13 on: later responses are drawn with the new "
            "value)"
        ),
        "actor.micro_batch_tokens: 64 -> 32",
        like("actor.optimizer.lr: 0.0003 -> 0.0001  (takes effect from iteration 13 on)"),
    ]
    assert "sampling.top_p" in found(now) and "seed" not in found(now)


def test_another_number_of_prompts_drops_the_rows_under_way() -> None:
    partial = {"rollout": {"max_staleness": 1, "partial": {"oversample": 2}}}
    data = {"train": "t.jsonl", "max_prompt_length": 8}
    one, other = (resolved(**partial, data=data | {"prompts_per_iteration": number}) for number in (4, 8))
    why = "the rows under way are dropped, and their prompts are not drawn again"
    assert found(other, one).lines() == [like(f"data.prompts_per_iteration: 4 -> 8  ({why})")]


def test_a_bucket_of_prompt_lengths_is_told_by_its_keys() -> None:
    sampling = {"max_response_length": 8, "samples_per_prompt": 2}
    one, other = (
        resolved(sampling=sampling | {"by_prompt_length": [{"up_to": 2, "temperature": x}]}) for x in (0.5, 0.7)
    )
    why = "later responses are drawn with the new values; log-probs and KL are at the new temperature; a surplus with "
    why += "groups of another size is dropped"
    assert found(one, other).lines() == [
        like(f"sampling.by_prompt_length.0.temperature: 0.7 -> 0.5  (takes effect from iteration 13 on: {why})")
    ]
    assert [(c.key, c.before, c.after) for c in found(one).found] == [
        ("sampling.by_prompt_length.0", "not there", GIVEN)
    ]


def test_all_that_is_refused_is_told_at_once() -> None:
    now = with_value("seed", 3, with_value("actor.dtype", "float32"))
    with pytest.raises(ConfigError) as error:
        found(now).refuse()
    assert str(error.value).splitlines() == [
        "what may not change in a resumed run:",
        like("seed: 0 -> 3: the key decides the order of prompts: the saved place means another prompt"),
        like("actor.dtype: bfloat16 -> float32: weights and optimizer state have that type"),
        "give the former values, or start anew with checkpoint.load: none",
    ]
    with pytest.raises(ConfigError, match=r"checkpoint\.load: RUN_DIR\. A fork may change"):
        found(with_value("seed", 3)).refuse()
    with pytest.raises(ConfigError, match="what may not change in a fork"):
        found(now, fork=True).refuse()


def test_another_algorithm_is_one_change_and_its_own_keys_are_none() -> None:
    grpo = {"algorithm": {"name": "grpo"}, "critic": None}
    assert [change.key for change in found(resolved(**grpo)).found if change.effect is REFUSED] == [
        "critic",
        "algorithm.name",
    ]
    keys = {change.key for change in found(resolved(**grpo)).found}
    assert not {key for key in keys if key.startswith("critic.")} and "algorithm.gamma" not in keys
    assert "algorithm.kl.use" in keys  # of both
    flows = [
        resolved(
            algorithm={"name": "custom", "flow": f"a:{name}", "roles": ["actor", "reward"]}, critic=None, reference=None
        )
        for name in ("x", "y")
    ]
    assert found(flows[1], flows[0]).lines()[0].startswith("algorithm.flow: a:x -> a:y  (may not change")


def test_a_reward_that_is_added_or_left_out_is_one_change() -> None:
    more = resolved(reward={"models": [MODEL, MODEL], "functions": [{"function": "a.b:c"}]})
    assert [(c.key, c.before, c.after) for c in found(more).found] == [("reward.models.1", "not there", GIVEN)]
    assert [(c.key, c.before, c.after) for c in found(resolved(), more).found] == [
        ("reward.models.1", GIVEN, "not there")
    ]


# ------------------------------------------------------------------------------------------------ what depends


def scheduled(num_iterations: int, **optimizer: Any) -> dict[str, Any]:
    return resolved(num_iterations=num_iterations, actor={**TRAINED, "optimizer": {"lr": 3e-4, **optimizer}})


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_more_iterations_say_what_becomes_of_the_rate(schedule: str) -> None:
    optimizer = OptimizerConfig(lr=3e-4, schedule=schedule, warmup_iterations=3)
    rates = [f"{learning_rate(optimizer, NEXT, n):.4g}" for n in (60, 100)]
    given = {"schedule": schedule, "warmup_iterations": 3}
    (line,) = found(scheduled(100, **given), scheduled(60, **given)).lines()
    assert line == (
        like(
            f"num_iterations: 60 -> 100  (takes effect from iteration 13 on: the {schedule} schedule of "
            f"actor.optimizer "
            f"now ends at 100: iteration 13 has the learning rate {rates[1]} instead of {rates[0]}; "
            f"critic.optimizer has "
            f"no schedule that ends)"
        )
    )
    assert rates[0] != rates[1]


def test_more_iterations_after_the_end_say_where_the_rate_was() -> None:
    given = {"schedule": "linear", "min_lr": 1e-5}
    (line,) = found(scheduled(24, **given), scheduled(12, **given)).lines()
    again = learning_rate(OptimizerConfig(lr=3e-4, **given), NEXT, 24)
    assert f"iteration 13 has the learning rate {again:.4g}, after 1e-05 at the former end" in line
    (line,) = found(scheduled(12), scheduled(24)).lines()
    assert "all 12 iterations are done" in line


def test_a_longer_prompt_may_be_allowed_where_none_is_dropped() -> None:
    longer = with_value("data.max_prompt_length", 9)
    assert [change.effect for change in found(longer).found] == [FREE]
    drops = with_value("data.overlong_prompts", "drop")
    assert found(drops).found[0].effect is FREE
    both = with_value("data.max_prompt_length", 9, drops)
    assert [change.effect for change in found(both, drops).found] == [REFUSED]
    assert [change.effect for change in found(both, drops, fork=True).found] == [NOTICED]
    effects = {change.key: change.effect for change in found(longer, drops).found}
    assert effects == {"data.max_prompt_length": REFUSED, "data.overlong_prompts": FREE}


def test_a_kl_coefficient_counts_where_it_is_fixed() -> None:
    (line,) = found(with_value("algorithm.kl.coef", 0.5)).lines()
    assert line == like("algorithm.kl.coef: 0.05 -> 0.5  (takes effect from iteration 13 on)")
    adaptive = with_value("algorithm.kl.controller", "adaptive")
    (line,) = found(with_value("algorithm.kl.coef", 0.5, adaptive), adaptive).lines()
    assert line.endswith("an adaptive controller continues from its saved coefficient)")


# ------------------------------------------------------------------------------------------------ other versions


def test_a_config_of_another_version_is_compared_as_far_as_it_goes() -> None:
    """What it lacks has its default; what is not known any more is shown; neither is refused."""
    saved = resolved()
    for key in ("watchdog", "platform", "nonfinite"):
        del saved[key]
    del saved["sampling"]["min_p"], saved["actor"]["optimizer"]["betas"]
    assert found(resolved(), saved).lines() == []
    saved["data"]["epochs"], saved["telemetry"] = 3, {"url": "x"}
    assert found(resolved(), saved).lines() == [
        "data.epochs: 3 -> not there  (this version does not know it)",
        like("telemetry: {'url': 'x'} -> not there  (this version does not know it)"),
    ]
    found(resolved(), saved).refuse()
    (line,) = found(with_value("watchdog.save_seconds", 5.0), saved).lines()[:1]
    assert line == "watchdog.save_seconds: 3600.0 -> 5.0"
    lacking = resolved()
    del lacking["actor"]["model"], lacking["num_iterations"]
    assert found(resolved(), lacking).lines() == [
        like(
            "num_iterations: not there -> 60  (takes effect from iteration 13 on: the version that saved did "
            "not have it)"
        ),
        like(
            "actor.model: not there -> m  (takes effect from iteration 13 on: the version that saved did not have it)"
        ),
    ]


def test_every_algorithm_is_made_flat_by_its_own_keys() -> None:
    custom = {"name": "custom", "flow": "a:b", "roles": ["actor"], "options": {"keep": {"x": 1}}}
    flat = flat_config(resolved(algorithm=custom, critic=None, reference=None, reward=None))
    assert flat["algorithm.options"] == {"keep": {"x": 1}} and flat["algorithm.roles"] == ["actor"]
    assert flat["critic"] is None and "critic.model" not in flat and flat["actor"] == GIVEN
    own = {f"algorithm.{name}" for name in Custom.model_fields}
    assert {key for key in flat if key.count(".") == 1 and key.startswith("algorithm.")} == own
    assert {"ppo", "grpo", "rloo", "custom"} < set(ALGORITHMS)


# ------------------------------------------------------------------------------------------------ contents


def hexed(**texts: str) -> dict[str, str]:
    return {name.replace("_", " "): text.encode().hex() for name, text in texts.items()}


CONTENT_EFFECTS = {
    "data.train": (REFUSED, NOTICED),
    "data.heldout": (NOTICED, NOTICED),
    "data.heldout.math.files": (NOTICED, NOTICED),
    "the tokenizer of actor.model": (REFUSED, NOTICED),
    "config.json of actor.model": (REFUSED, REFUSED),
    "config.json of critic.model": (REFUSED, REFUSED),
    "config.json of reference.model": (REFUSED, NOTICED),
    "config.json of reward.models.1.model": (REFUSED, NOTICED),
    "hybridflow's code": (NOTICED, NOTICED),
    "the version of torch": (NOTICED, NOTICED),
    "the file of my.rewards": (NOTICED, NOTICED),
}


@pytest.mark.parametrize("name", CONTENT_EFFECTS)
def test_a_content_may_change_or_not(name: str) -> None:
    saved, now = {name: "ab" * 16, "the config": "00"}, {name: "cd" * 16, "the config": "11"}
    for fork, effect in zip((False, True), CONTENT_EFFECTS[name], strict=True):
        different = content_changes(saved, now, next_iteration=NEXT, fork=fork)
        assert [(change.key, change.effect) for change in different.found] == [(name, effect)]
        if effect is REFUSED:
            with pytest.raises(ConfigError, match=f"{name}: abababababab -> cdcdcdcdcdcd: "):
                different.refuse()
        else:
            different.refuse()
    assert content_changes(saved, saved, next_iteration=NEXT).found == ()
    assert content_changes(saved, {}, next_iteration=NEXT).found == ()  # the config says so


def test_every_digest_of_a_run_has_a_rule(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    config = ExperimentConfig.from_yaml(
        write_config(tmp_path / "config.yaml", tmp_path),
        [f"data.heldout={tmp_path / 'heldout.jsonl'}", "metrics.eval_reward=hybridflow.rewards:exact_match"],
    )
    digests = {name: digest.hex() for name, digest in run_digests(config, load_inputs(config, VOCAB_SIZE)).items()}
    assert {"data.heldout", "config.json of reward.models.0.model", "the file of hybridflow.rewards"} <= set(digests)
    other = {name: digest[::-1] for name, digest in digests.items()}
    different = content_changes(digests, other, next_iteration=NEXT)
    assert {change.key for change in different.found} == set(digests) - {"the config"}
    assert [change.key for change in different.found if change.rule is UNKNOWN] == []


def test_versions_are_shown_as_they_are() -> None:
    saved, now = hexed(the_version_of_torch="2.12.0"), hexed(the_version_of_torch="2.13.0+cpu")
    assert content_changes(saved, now, next_iteration=NEXT).lines() == [
        like(
            "the version of torch: 2.12.0 -> 2.13.0+cpu  (takes effect from iteration 13 on: bit for bit the same only "
            "with the same code and versions)"
        )
    ]
    (change,) = content_changes({"novelty": "ff"}, {"novelty": "fe"}, next_iteration=NEXT).found
    assert change.rule is UNKNOWN


# ------------------------------------------------------------------------------------------------ fixed data


def fixed(**given: Any) -> dict[str, Any]:
    """A whole config of a DPO run as it is dumped."""
    tree = {
        "name": "run",
        "num_iterations": 60,
        "data": {"train": "t.jsonl", "batch_size": 4, "max_length": 16},
        "actor": TRAINED | {"optimizer": {"lr": 3e-4, "schedule": "linear"}},
        "reference": MODEL,
        "algorithm": {"name": "dpo"},
        **given,
    }
    return FixedDataConfig.model_validate(tree).model_dump(mode="json")


def test_a_run_on_fixed_data_may_change_what_it_aims_at_and_not_its_rows() -> None:
    other = fixed(
        data={"train": "t.jsonl", "batch_size": 8, "max_length": 24},
        algorithm={"name": "dpo", "beta": 0.2},
        num_iterations=None,
        num_epochs=2,
    )
    between = found(other, fixed())
    told = {change.key: change.effect for change in between.found}
    assert told == {
        "num_iterations": NOTICED,
        "num_epochs": NOTICED,
        "data.batch_size": NOTICED,
        "data.max_length": REFUSED,
        "algorithm.beta": NOTICED,
    }
    with pytest.raises(ConfigError, match=r"data.max_length: 16 -> 24: the keys decide which rows there are"):
        between.refuse()


def test_another_length_of_a_run_on_fixed_data_names_the_rate_it_leads_to() -> None:
    [line] = found(fixed(num_iterations=120), fixed()).lines()
    assert line.startswith("num_iterations: 60 -> 120") and "the linear schedule of actor.optimizer now ends" in line


# ------------------------------------------------------------------------------------------------ the table


def test_no_key_has_two_rules() -> None:
    keys = [key for rule in TABLE for key in rule.keys]
    assert len(keys) == len(set(keys)) > 100


def test_an_importance_cap_of_an_earlier_version_is_the_same_as_what_it_became() -> None:
    now = with_value("algorithm.policy.importance", {"kind": "token", "cap": 2.0, "low": None, "high": None})
    earlier = copy.deepcopy(resolved())
    del earlier["algorithm"]["policy"]["importance"]
    earlier["algorithm"]["policy"]["importance_cap"] = 2.0
    assert found(now, earlier).lines() == []
    earlier["algorithm"]["policy"]["importance_cap"] = None
    assert found(resolved(), earlier).lines() == []
    assert found(with_value("algorithm.policy.importance", None, now), now).lines() == [
        like("algorithm.policy.importance: given -> None  (takes effect from iteration 13 on)")
    ]


def test_sources_of_data_have_the_keys_of_their_kind() -> None:
    """Whatever a source is, a run goes on as long as the rows are the same; a weight decides their order."""
    tasks = {"reasoning_gym": [{"name": "chain_sum", "size": 4, "seed": 1, "weight": 2.0}]}
    hub = {"hub": "a/b", "name": "main", "split": "train"}
    trees = [flat_config({"data": {"train": train}}) for train in ("a.jsonl", [hub], tasks)]
    own = [{key for key in tree if key.startswith("data.train.")} for tree in trees]
    assert own[0] == set() and own[1] == {f"data.train.0{key}" for key in ("", ".hub", ".name", ".split", *MORE)}
    assert {"data.train.system_prompt", "data.train.reasoning_gym.0.name"} <= own[2]
    effects = {key: rule_of(key).effect(fork=False) for keys in own for key in keys}
    assert {key for key, effect in effects.items() if effect is not Effect.FREE} == {
        "data.train.0.weight",
        "data.train.reasoning_gym.0.weight",
    }


MORE = (".revision", ".weight")


def test_a_set_that_is_drawn_in_another_way_is_told() -> None:
    sets = {"math": {"files": "m.jsonl", "samples": 1, "temperature": 0.0, "interval": None}, "b": {"files": "b.jsonl"}}
    saved = with_value("data.heldout", sets)
    for key, value, effect in (
        ("data.heldout.math.samples", 4, NOTICED),
        ("data.heldout.math.temperature", 0.5, NOTICED),
        ("data.heldout.math.interval", 20, FREE),
        ("data.heldout.math.files", "moved.jsonl", FREE),
    ):
        [change] = found(with_value(key, value, saved), saved).found
        assert (change.key, change.effect) == (key, effect)
