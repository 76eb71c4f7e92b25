"""hybridflow/config/refused_pairs.yaml: every pair is refused, by the loader and in an editor, and nowhere else."""

import ast
import copy
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from hybridflow.config import ExperimentConfig, read_value, set_key
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.json_schema import config_schema
from hybridflow.config.key_list import entries
from hybridflow.config.refused_pairs import RefusedPair, refused_pairs
from hybridflow.config.section import Section
from hybridflow.errors import ConfigError
from tests.remedies import keys_of, told
from tests.test_config import MINIMAL
from tests.test_foreign_keys import DPO

PLACES = {"ROLE": "actor", "ROLE.lora": "actor.lora", "ROLE.megatron_arguments": "actor.megatron_arguments"}
PLACES["data.heldout.NAME"] = "data.heldout.math"
COLUMN = "data.columns.prompt"  # a name of the user's
PROPERTIES = {"sampling.samples.varies"}
SCHEMA = Draft202012Validator(config_schema())

# of each pair in the file's order, overrides with which it is refused
EXAMPLES = [
    # ---- RunConfig
    ["metrics.eval_interval=5"],
    # ---- ExperimentConfig
    ["algorithm={name: remax}", "data.environment=a:B"],
    ["algorithm={name: distill}", "data.environment=a:B"],
    ["data.environment={class: 'a:B', earlier_turns: branch}", "reward.models=[{model: m}]"],
    ["data.environment=a:B", "reward.models=[{model: m}, {model: m, reencode: true}]"],
    ["data.environment={agent: 'a:b'}", "sampling.by_prompt_length=[{up_to: 9, temperature: 0.5}]"],
    ["algorithm.kl.use=loss"],
    ["algorithm.policy={kind: gspo, loss_mean: sequence_token_mean}"],
    ["algorithm={name: reinforce, policy: {kind: gspo, loss_mean: sequence_token_mean}}", "critic=null"],
    ["algorithm={name: rloo}", "critic=null", "sampling.samples_per_prompt=1"],
    ["algorithm={name: reinforce, baseline: group}", "critic=null", "sampling.samples_per_prompt=1"],
    ["algorithm={name: maxrl}", "critic=null", "reference=null", "reward.truncation_penalty=0.5"],
    ["algorithm.kl.reset_reference_interval=5", "actor.lora={}"],
    ["algorithm.update.whole_prompts=true", "sampling.by_prompt_length=[{up_to: 9, samples_per_prompt: 4}]"],
    ["algorithm={name: grpo, dynamic_sampling: {}}", "critic=null", "checkpoint.save_rollout=true"],
    ["rollout.partial={}"],
    ["rollout.max_staleness=2", "rollout.ranks=1"],
    ["rollout.max_staleness=1"],
    ["rollout.max_staleness=1", "rollout.ranks=1", "actor.ranks=0", "critic.ranks=0"],
    ["algorithm={name: remax}", "critic=null", "rollout.max_staleness=1", "rollout.partial={}"],
    ["algorithm={name: opo}", "critic=null", "reference=null", "rollout.max_staleness=1", "rollout.partial={}"],
    ["algorithm={name: distill}", "critic=null", "reward=null", "rollout.max_staleness=1", "rollout.partial={}"],
    ["rollout.max_staleness=1", "rollout.partial={}", "checkpoint.save_rollout=true"],
    [
        "rollout={max_staleness: 1, ranks: '1', score_while_waiting: true}",
        "actor.ranks=0",
        "critic.ranks=0",
        "reference.ranks=0",
    ],
    ["rollout.max_staleness=1", "rollout.partial={}", "rollout.score_while_waiting=true"],
    ["rollout.max_staleness=1", "rollout.partial={}", "sampling.presence_penalty=0.5"],
    ["algorithm.policy.old_log_probs=engine", "sampling.top_p=0.9"],
    ["rollout.max_staleness=1", "rollout.partial={}", "sampling.top_p=0.9"],
    ["algorithm.policy.importance={}", "sampling.top_p=0.9"],
    # ---- FixedDataConfig
    ["num_epochs=1", "num_iterations=1"],
    ["num_epochs=null"],
    ["actor.offload_optimizer=true"],
    ["actor.offload_gradients=true"],
    *(
        [
            "algorithm={name: reward_model}",
            "actor=null",
            f"reward_model={{model: m, {key}, optimizer: {{lr: 1}}}}",
        ]
        for key in ("offload_optimizer: true", "offload_gradients: true")
    ),
    ["metrics.eval_reward=a:b"],
    ["algorithm={name: kto}"],
    # ---- StopConfig
    ["stop_when={metric: train/loss, at_most: 1, at_least: 0}"],
    ["stop_when={metric: train/loss}"],
    # ---- DataConfig
    ["data.environment=a:B", "data.chat_template=false"],
    ["data.prompt_key=question", "data.columns={prompt: q}"],
    # ---- HeldoutSetConfig
    ["data.heldout={math: {files: a.jsonl, samples: 4}}"],
    # ---- EnvironmentConfig
    ["data.environment={class: 'a:B', agent: 'a:b'}"],
    ["data.environment={agent: 'a:b', verifiers: x, python: p}"],
    ["data.environment={class: 'a:B', prompt: column}"],
    ["data.environment={verifiers: x}"],
    ["data.environment={agent: 'a:b', python: p}"],
    ["data.environment={verifiers: x, python: p, prompt: column}"],
    # ---- ScoringConfig
    ["reward.on_error=score"],
    ["reward.error_score=1"],
    # ---- RemoteRewardConfig
    ["reward.remote=[{url: 'http://a/b', kind: openai}]"],
    # ---- LayoutConfig
    ["actor.sequence_parallel=true"],
    ["actor.virtual_pipeline_parallel_size=2"],
    # ---- RoleConfig
    ["actor.token_dispatcher=deepep", "actor.expert_parallel_size=2", "actor.dtype=float32"],
    # ---- LoraConfig
    ["actor.lora={adapter_path: a, target_modules: [q_proj]}"],
    # ---- MegatronArguments
    ["actor.megatron_arguments={overlap_p2p_comm: true, batch_p2p_comm: true}"],
    # ---- PPO
    ["algorithm.positive_nll_coef=0.1", "algorithm.policy.loss_mean=sequence_token_mean"],
    # ---- OPO
    ["algorithm={name: opo, policy: {entropy_coef: 0.1}}", "critic=null", "reference=null"],
    # ---- Reinforce
    ["algorithm={name: reinforce, baseline: group, kl: {use: reward}}", "critic=null"],
    ["algorithm={name: reinforce, baseline: group, gamma: 0.9}", "critic=null"],
    # ---- DPO
    ["algorithm={name: dpo, loss: ipo, label_smoothing: 0.1}"],
    # ---- KL
    ["algorithm.kl={use: none, controller: adaptive}", "reference=null"],
    ["algorithm.kl={use: none, reset_reference_interval: 5}", "reference=null"],
    ["algorithm.kl.estimator=k3+"],
    # ---- PolicyLoss
    ["algorithm.policy.dual_clip=3"],
    ["algorithm.policy.tau_positive=1"],
    ["algorithm.policy.kind=sapo", "algorithm.policy.clip_range=0.1"],
    ["algorithm.policy.kind=gspo"],
    ["algorithm.policy.old_log_probs=engine", "algorithm.policy.importance={}"],
    # ---- Importance
    ["algorithm.policy.importance={kind: icepop, cap: 2}"],
    ["algorithm.policy.importance={low: 0.5}"],
    ["algorithm.policy.importance={kind: geometric}"],
]


def tree_of(pair: RefusedPair, overrides: list[str]) -> dict[str, Any]:
    tree = copy.deepcopy(DPO if pair.section in ("FixedDataConfig", "DPO") else MINIMAL)
    for override in overrides:
        key, _, value = override.partition("=")
        set_key(tree, key.split("."), read_value(value, key), key)
    return tree


def load(pair: RefusedPair, tree: dict[str, Any]) -> None:
    (FixedDataConfig if pair.section in ("FixedDataConfig", "DPO") else ExperimentConfig).from_tree(tree, "x.yaml")


def test_every_pair_has_an_example() -> None:
    assert len(EXAMPLES) == len(refused_pairs())


@pytest.mark.parametrize(("pair", "overrides"), zip(refused_pairs(), EXAMPLES, strict=True))
def test_every_pair_is_refused_with_the_reason(pair: RefusedPair, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(pair, tree_of(pair, overrides))
    assert " cannot go with " in str(raised.value) and pair.reason in str(raised.value)


UNTOLD = {"StopConfig"}  # of a metric that is stopped at, only the user knows the value


@pytest.mark.parametrize(("pair", "overrides"), zip(refused_pairs(), EXAMPLES, strict=True))
def test_what_every_refusal_tells_to_set_mends_it(pair: RefusedPair, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(pair, tree_of(pair, overrides))
    ways = list(told(str(raised.value)))
    assert ways or pair.section in UNTOLD, raised.value
    for settings in ways:
        tree = tree_of(pair, overrides)
        for key, setting in zip(keys_of(settings), settings, strict=True):
            set_key(tree, key.split("."), read_value(setting.partition("=")[2], key), key)
        try:
            load(pair, tree)
        except ConfigError as error:  # another refusal may come next
            assert pair.reason not in str(error), (settings, error)


def test_an_editor_marks_the_pairs_that_a_file_has() -> None:
    marked = 0
    for pair, overrides in zip(refused_pairs(), EXAMPLES, strict=True):
        tree = tree_of(pair, overrides)
        section: Any = json.loads(json.dumps(tree))
        for name in PLACES.get(pair.place, pair.place).split(".") if pair.place else ():
            section = section[int(name) if name.isdecimal() else name]
        conditions = (*pair.sides, *((each,) for each in pair.where))
        if all(any(each.met_by(section) for each in side) for side in conditions):
            assert not SCHEMA.is_valid(tree), overrides
            marked += 1
    assert marked >= 35
    assert [error.message for error in SCHEMA.iter_errors(MINIMAL)] == []


def test_the_keys_are_keys() -> None:
    kinds = {kind.__name__ for kind in kinds_of(Section)}
    for pair in refused_pairs():
        assert pair.section in kinds
        for condition in (*pair.sides[0], *pair.sides[1], *pair.where):
            key = ".".join(part for part in (PLACES.get(pair.place, pair.place), condition.key) if part)
            if key not in PROPERTIES:
                assert entries(key.replace("data.heldout.math", "data.heldout.NAME").replace(COLUMN, "data.columns"))


def kinds_of(section: type[Section]) -> list[type[Section]]:
    return [section, *(kind for each in section.__subclasses__() for kind in kinds_of(each))]


# ------------------------------------------------------------------------------------------------ nowhere else


# functions that look at two keys, and refuse no pair of values -> why
OTHER_RULES = {
    "algorithms._check": "the models of a flow are a list of names",
    "experiment._check_scores_and_turns": "one of three lists is enough",
    "experiment._check_evaluation": "one of three keys is enough",
    "losses._check": "1 lies between two numbers",
    "roles._check_dispatcher": "the text has a product of sizes",
    "sampling.check_buckets": "the values of buckets are compared",
}


def test_no_other_place_refuses_a_pair() -> None:
    """No error stands below conditions on two keys that ask for some values alone, or whether the keys are there."""
    found = {}
    for path in sorted(Path(inspect.getfile(Section)).parent.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for keys in asked_before_errors(function.body):
                    if len(keys) > 1:
                        found[f"{path.stem}.{function.name}"] = keys
    assert found.keys() == OTHER_RULES.keys(), found


def asked_before_errors(body: list[ast.stmt]) -> Iterator[set[str]]:
    """The keys that the conditions above each `raise` ask for."""
    for node in body:
        if isinstance(node, ast.Raise):
            yield set()
        elif isinstance(node, ast.If):
            yield from (keys | asked(node.test) for keys in asked_before_errors(node.body))
            yield from asked_before_errors(node.orelse)
        elif isinstance(node, ast.For):
            yield from asked_before_errors(node.body)


def asked(test: ast.expr) -> set[str]:
    """Attributes that are compared with constants or taken as true or false; none where two of them are compared."""
    match test:
        case ast.BoolOp():
            return set().union(*map(asked, test.values))
        case ast.UnaryOp():
            return asked(test.operand)
        case ast.Compare(left=ast.Attribute() as key, comparators=[ast.Constant() | ast.Tuple()]):
            return {ast.unparse(key)}
        case ast.Compare(left=ast.Constant(), comparators=[ast.Attribute() as key]):
            return {ast.unparse(key)}
        case ast.Call(func=ast.Name("isinstance"), args=[ast.Attribute() as key, _]):
            return {ast.unparse(key)}
        case ast.Attribute():
            return {ast.unparse(test)}
    return set()
