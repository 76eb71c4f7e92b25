"""Refusals of sizes, lengths, batches and ranks name `key=value`, and each of these gets a start past the refusal."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.config.files import read_tree
from hybridflow.config.kinds import config_class
from hybridflow.errors import ConfigError
from hybridflow.placement.placed import place
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.placement.test_placed import describe
from tests.remedies import keys_of, refusal_of, told

EXPERTS = "actor.model={inputs}/mixture"
BESIDE = ("actor.ranks=0-1", "critic.ranks=0-1", "reference.ranks=0-1", "reward.models.0.ranks=0-1")
STALE = ("rollout.max_staleness=1", "rollout.tensor_parallel_size=1", *BESIDE)
PROFILE = "metrics.profile={iterations: [1], ranks: [0]}"
BUCKET = "sampling.by_prompt_length=[{up_to: 4, max_response_length: 4}, {up_to: 8, temperature: 0.5}]"
GRPO = ("algorithm={name: grpo, update: {mini_batch_size: 4}}", "critic=null", "sampling.samples_per_prompt=2")

# overrides of a config that fits four ranks
REFUSED = [
    # ---- ranks
    ("actor.tensor_parallel_size=3",),
    ("critic.tensor_parallel_size=3", "critic.pipeline_parallel_size=3"),
    ("reference.context_parallel_size=3",),
    ("reference.data_parallel_size=3",),
    ("reference.tensor_parallel_size=3", "reference.data_parallel_size=2"),
    ("critic.ranks=2-4",),
    ("critic.ranks='1,0'",),
    ("actor.ranks=0-2", "critic.ranks=2-3", "actor.tensor_parallel_size=1"),
    BESIDE,
    ("actor.ranks=0-1", "rollout.ranks=1-2"),
    ("rollout.tensor_parallel_size=3",),
    ("rollout.tensor_parallel_size=3", "rollout.pipeline_parallel_size=3"),
    (*STALE, "rollout.ranks=0,3"),
    (*STALE, "rollout.ranks=1-3"),
    (PROFILE, "metrics.profile.ranks=[0,7]"),
    # ---- models
    ("actor.tensor_parallel_size=4", "actor.hf_overrides.max_position_embeddings=16"),
    ("reference.pipeline_parallel_size=4",),
    ("critic.pipeline_parallel_size=2", "critic.virtual_pipeline_parallel_size=2"),
    ("critic.pipeline_parallel_size=2", "critic.num_layers_in_first_pipeline_stage=6"),
    ("rollout.pipeline_parallel_size=8", "rollout.tensor_parallel_size=1"),
    ("reference.expert_parallel_size=2",),
    ("reference.expert_tensor_parallel_size=2", "reference.tensor_parallel_size=2"),
    ("actor.tensor_parallel_size=1", "rollout.tensor_parallel_size=2", "rollout.enable_expert_parallel=true"),
    ("algorithm.policy.replay_routing=true",),
    ("sampling.max_response_length=150",),
    ("sampling.max_response_length=150", "data.max_prompt_length=150"),
    ("rollout.kv_cache_gib=0.0001",),
    ("actor.recompute=[moe]",),
    ("reference.model={inputs}/small",),
    ("reward.models.0.model={inputs}/small_reward",),
    ("actor.lora={target_modules: [nothing]}",),
    ("actor.lora={exclude_modules: [q_proj, nothing]}",),
    ("actor.lora={target_modules: [q_proj], exclude_modules: [q_proj]}",),
    # ---- mixtures
    (EXPERTS, "actor.expert_parallel_size=3", "actor.tensor_parallel_size=1"),
    (EXPERTS, "actor.expert_parallel_size=8", "actor.tensor_parallel_size=1"),
    (EXPERTS, "actor.tensor_parallel_size=4", "actor.expert_tensor_parallel_size=1"),
    (EXPERTS, "actor.tensor_parallel_size=2", "actor.expert_parallel_size=4"),
    (EXPERTS, "actor.tensor_parallel_size=1", "actor.token_dispatcher=deepep"),
    # ---- batches and lengths
    ("algorithm.update.mini_batch_size=3",),
    ("algorithm.update.mini_batch_size=2", "actor.tensor_parallel_size=1"),
    ("data.prompts_per_iteration=2", "algorithm.update.mini_batch_size=2", "actor.tensor_parallel_size=1"),
    (*GRPO, "algorithm.update.whole_prompts=true", "algorithm.update.mini_batch_size=1"),
    ("actor.micro_batch_tokens=16",),
    ("sampling.min_response_length=9",),
    ("sampling.expected_response_length=9",),
    ("sampling.temperature=0.001",),
    (BUCKET, "sampling.by_prompt_length.1.up_to=3"),
    (BUCKET, "sampling.by_prompt_length.0.max_response_length=9"),
    (BUCKET, "sampling.min_response_length=5"),
    ("reward.overlong={buffer: 9}",),
    ("rollout.max_staleness=1", "rollout.partial={oversample: 3}"),
    ("algorithm.kl={controller: adaptive, horizon: 0.5}",),
    ("actor.optimizer.min_lr=1",),
    # ---- evaluation and metrics
    ("metrics.eval_interval=2", "data.heldout={a: {files: x.jsonl, interval: 3}}", "metrics.eval_reward=a:b"),
    ("data.heldout={a: {files: x.jsonl, interval: 3}}",),
    ("data.heldout={a: {files: x.jsonl, temperature: 0.001}}",),
    ("metrics.eval_interval=2", "data.heldout=x.jsonl"),
    ("stop_when={metric: eval/loss, at_most: 1}",),
    ("checkpoint={keep_best: 1, best_metric: eval/loss}",),
    (PROFILE, "metrics.profile.iterations=[2,5]"),
    ("algorithm.policy.importance={kind: icepop, low: 2}",),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models by their config.json: 8 heads, 4 key/value heads, 6 layers, 128 positions; and a mixture of 4 experts."""
    inputs = make_inputs(tmp_path_factory.mktemp("told"))
    for name in ("policy", "critic", "reference", "reward"):
        describe(inputs / name, num_hidden_layers=6)
    for name, source in (("small", "reference"), ("small_reward", "reward")):
        describe(shutil.copytree(inputs / source, inputs / name), vocab_size=64)
    describe(
        shutil.copytree("configs/shapes/qwen3-30b-a3b", inputs / "mixture"),
        vocab_size=100,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return inputs


@pytest.fixture
def refusal(inputs: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The lines of the refusal of a config that fits four ranks but for these overrides; none of one that fits."""
    path = write_config(tmp_path / "config.yaml", inputs)

    def lines(*overrides: str) -> list[str]:
        given = [override.replace("{inputs}", str(inputs)) for override in overrides]
        try:
            tree = read_tree(path, ["algorithm.update.mini_batch_size=4", *given])
            place(config_class(tree).from_tree(tree, path), 4, cuda=False)
        except ConfigError as error:
            return str(error).replace(f"{path}: ", "").splitlines()
        return []

    return lines


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_a_refusal_tells_to_set_gets_past_it(
    overrides: tuple[str, ...], refusal: Callable[..., list[str]]
) -> None:
    lines = refusal(*overrides)
    assert lines
    for line in lines:
        ways = list(told(line))
        assert ways, line
        for settings in ways:
            assert keys_of(settings)
            after = refusal(*overrides, *settings)
            assert refusal_of(line) not in map(refusal_of, after), (settings, after)
