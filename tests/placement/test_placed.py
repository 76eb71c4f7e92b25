"""What a config is on four ranks, and every reason why it is nothing: models, layouts and engine, by message."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.automap.search import specs_of
from hybridflow.config import ExperimentConfig
from hybridflow.errors import ConfigError
from hybridflow.models.routing import RoutingSizes
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.placement import placed
from hybridflow.placement.cache_room import with_room
from hybridflow.placement.placed import PlacedRun, check_output_dir, place
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.messages import like

WORLD_SIZE = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Models of 8 heads, 4 key/value heads and 6 layers by their config.json; nothing here reads weights."""
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    for name in ("policy", "critic", "reference", "reward"):
        describe(inputs / name, num_hidden_layers=6)
    return inputs


def describe(model: Path, **fields: int) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def load(inputs: Path, directory: Path, *overrides: str, cuda: bool = False) -> PlacedRun:
    """A config that fits four ranks."""
    path = write_config(directory / "config.yaml", inputs)
    config = ExperimentConfig.from_yaml(path, ["algorithm.update.mini_batch_size=4", *overrides])
    return place(config, WORLD_SIZE, cuda=cuda)


def problem(inputs: Path, directory: Path, *overrides: str, cuda: bool = False) -> str:
    with pytest.raises(ConfigError) as raised:
        load(inputs, directory, *overrides, cuda=cuda)
    return str(raised.value)


# ------------------------------------------------------------------------------------------------ what fits


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("actor.tensor_parallel_size=4",),
        (
            "actor.pipeline_parallel_size=2",
            "critic.pipeline_parallel_size=2",
            "critic.virtual_pipeline_parallel_size=3",
        ),
        ("critic.pipeline_parallel_size=4", "critic.num_layers_in_first_pipeline_stage=3"),
        ("actor.tensor_parallel_size=1", "rollout.tensor_parallel_size=4"),
        ("actor.tensor_parallel_size=1", "rollout.pipeline_parallel_size=4"),  # stages of 2, 2, 1, 1 layers
        ("actor.ranks=0-1", "rollout.ranks=2-3", "rollout.tensor_parallel_size=1"),
    ],
)
def test_layouts_that_suit_the_models(inputs, tmp_path, overrides):
    run = load(inputs, tmp_path, *overrides)
    assert run.rollout.ranks == run.config.rollout_ranks(WORLD_SIZE)
    assert [layer for stage in run.stages for layer in stage] == list(range(run.actor.spec.num_layers))


def test_what_a_placed_run_holds(inputs, tmp_path):
    run = load(inputs, tmp_path, "critic.pipeline_parallel_size=2", "critic.virtual_pipeline_parallel_size=3")
    assert list(run.models) == ["actor", "critic", "reference", "reward.models.0"]
    assert [model.head for model in run.models.values()] == ["lm", "score", "lm", "score"]
    everywhere = (0, 1, 2, 3)
    assert run.actor.layout == Layout(2, 1, 2, everywhere)
    assert run.models["critic"].layout == Layout(1, 2, 2, everywhere, vpp=3)
    assert run.models["critic"].config is run.config.critic
    assert run.models["reference"].spec == read_spec(inputs / "reference")
    assert run.reward_models == [run.models["reward.models.0"]]
    assert (run.config.actor.tensor_parallel_size, run.world_size) == (2, 4)


def test_a_directory_of_several_roles_is_read_once(inputs, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(placed, "read_spec", lambda path: read.append(path) or read_spec(path))
    policy, critic, reward = (str(inputs / name) for name in ("policy", "critic", "reward"))
    load(inputs, tmp_path, f"reference.model={policy}")
    assert read == [policy, critic, reward]


def test_where_the_engine_runs(inputs, tmp_path):
    """On the actor's ranks, at the intervals of its cut; on ranks of its own, neighbours together."""
    run = load(inputs, tmp_path, "rollout.tensor_parallel_size=1", "rollout.pipeline_parallel_size=2")
    assert run.stages == ((0, 1, 2), (3, 4, 5))
    assert run.rollout == RolloutLayout(1, 2, ((0, 2), (1, 3)))
    run = load(inputs, tmp_path, "actor.ranks=0,2", "rollout.ranks=1,3")
    assert run.stages == ((0, 1, 2, 3, 4, 5),)
    assert run.rollout == RolloutLayout(2, 1, ((1, 3),))


# ------------------------------------------------------------------------------------------------ what does not


@pytest.mark.parametrize(
    ("overrides", "model", "expected"),
    [
        (
            ("actor.tensor_parallel_size=1", "actor.pipeline_parallel_size=4"),
            "policy",
            "actor.pipeline_parallel_size = 4 and num_hidden_layers = 6 of {}: 6 layers cannot be cut into 4 pipeline "
            "stages: 6 are left for 4 equal stages. Set actor.pipeline_parallel_size=2 or 3",
        ),
        (
            ("reference.pipeline_parallel_size=2", "reference.virtual_pipeline_parallel_size=2"),
            "reference",
            "reference.pipeline_parallel_size = 2, reference.virtual_pipeline_parallel_size = 2 and num_hidden_layers "
            "= 6 of {}: the 3 layers of pipeline stage 0 cannot be cut into 2 model chunks: 3 = 1 x 2 + 1. Set "
            "reference.virtual_pipeline_parallel_size=1",
        ),
        (
            ("critic.pipeline_parallel_size=4", "critic.num_layers_in_first_pipeline_stage=2"),
            "critic",
            "critic.pipeline_parallel_size = 4, critic.num_layers_in_first_pipeline_stage = 2 and num_hidden_layers = "
            "6 of {}: 6 layers cannot be cut into 4 pipeline stages: 4 are left for 3 equal stages beside the stages "
            "of [2]. Set critic.pipeline_parallel_size=2 or 3, or critic.num_layers_in_first_pipeline_stage=3",
        ),
        (
            ("reward.models.0.pipeline_parallel_size=2", "reward.models.0.num_layers_in_last_pipeline_stage=6"),
            "reward",
            "reward.models.0.pipeline_parallel_size = 2, reward.models.0.num_layers_in_last_pipeline_stage = 6 and "
            "num_hidden_layers = 6 of {}: 6 layers cannot be cut into 2 pipeline stages: 0 are left for 1 equal stages "
            "beside the stages of [6]. Set reward.models.0.num_layers_in_last_pipeline_stage=1, 2, 3, 4 or 5",
        ),
    ],
)
def test_layers_that_a_role_cannot_be_cut_into(inputs, tmp_path, overrides, model, expected):
    assert problem(inputs, tmp_path, *overrides) == expected.format(inputs / model)


def test_heads_that_the_engine_cannot_share(inputs, tmp_path):
    """The actor itself is not cut."""
    policy = shutil.copytree(inputs / "policy", tmp_path / "policy")
    describe(policy, num_attention_heads=9, num_key_value_heads=9)
    keys = (f"actor.model={policy}", "actor.tensor_parallel_size=1", "rollout.tensor_parallel_size=2")
    assert problem(inputs, tmp_path, *keys) == (
        like(f"rollout.tensor_parallel_size = 2 does not divide num_attention_heads = 9 of {policy}: 9 = 4 x 2 + 1")
    )
    describe(policy, num_attention_heads=12, num_key_value_heads=6)
    keys = (f"actor.model={policy}", "actor.tensor_parallel_size=1", "rollout.tensor_parallel_size=4")
    assert problem(inputs, tmp_path, *keys) == (
        like(
            f"rollout.tensor_parallel_size = 4 must divide num_key_value_heads = 6 of {policy} or be a "
            "multiple of that number: 6 = 1 x 4 + 2"
        )
    )


def test_layers_that_do_not_fill_the_engines_stages(inputs, tmp_path):
    policy = shutil.copytree(inputs / "policy", tmp_path / "policy")
    describe(policy, num_hidden_layers=3)
    keys = (f"actor.model={policy}", "actor.tensor_parallel_size=1", "rollout.pipeline_parallel_size=4")
    assert problem(inputs, tmp_path, *keys) == (
        like("rollout.pipeline_parallel_size = 4 exceeds num_hidden_layers = 3: a stage needs a layer")
    )


@pytest.mark.parametrize(
    ("role", "model", "expected"),
    [
        ("reward.models.0", "policy", "a *ForSequenceClassification with a trained score.weight, it is a *ForCausalLM"),
        ("actor", "reward", "a *ForCausalLM, it is a *ForSequenceClassification"),
        ("reference", "reward", "a *ForCausalLM, it is a *ForSequenceClassification"),
    ],
)
def test_heads_of_the_wrong_kind(inputs, tmp_path, role, model, expected):
    message = problem(inputs, tmp_path, f"{role}.model={inputs / model}")
    assert message == f"{role}.model = {inputs / model} must be {expected}"


@pytest.mark.parametrize("model", ["policy", "reward"])
def test_a_critic_starts_from_either(inputs, tmp_path, model):
    assert load(inputs, tmp_path, f"critic.model={inputs / model}").models["critic"].head == "score"


def test_a_reference_that_becomes_the_actor_has_its_sizes(inputs, tmp_path):
    reset = ("algorithm.kl.reset_reference_interval=5", "reference.tensor_parallel_size=2")
    assert load(inputs, tmp_path, *reset).models["reference"].layout.tp == 2
    other = shutil.copytree(inputs / "policy", tmp_path / "other")
    describe(other, num_hidden_layers=3)
    assert problem(inputs, tmp_path, *reset, f"reference.model={other}") == (
        like(
            f"algorithm.kl.reset_reference_interval: reference.model = {other} must have the sizes of actor.model = "
            f"{inputs / 'policy'}, whose weights it takes"
        )
    )


def test_all_reasons_at_once(inputs, tmp_path):
    """Of grids that do not fill their ranks, of models, of the engine; what two roles share is told once."""
    keys = (
        *("actor.model=nowhere", "reference.model=nowhere", "actor.ranks=0-2"),
        *(
            "critic.tensor_parallel_size=3",
            "critic.virtual_pipeline_parallel_size=4",
            "critic.pipeline_parallel_size=4",
        ),
        *("reward.models.0.tensor_parallel_size=16", f"reward.models.0.model={inputs / 'policy'}"),
        *("rollout.ranks=3-4", "sampling.max_response_length=1000"),
    )
    lines = problem(inputs, tmp_path, *keys).splitlines()
    assert [line.partition(":")[0].partition(" =")[0] for line in lines] == [
        *("actor", "critic", "reward.models.0", "rollout.ranks", "nowhere/config.json"),
        "data.max_prompt_length + sampling.max_response_length",  # of the critic's model
        *("reward.models.0.model", "data.max_prompt_length + sampling.max_response_length"),
        *("critic.tensor_parallel_size", "critic.pipeline_parallel_size", "reward.models.0.tensor_parallel_size"),
    ]


# ------------------------------------------------------------------------------------------------ hf_overrides

YARN = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 100}"
LONGER = f"{{max_position_embeddings: 400, rope_scaling: {YARN}}}"
BEYOND = "sampling.max_response_length=288"  # rows of 300 tokens, models of 128


def test_overrides_are_of_all_roles_with_the_actors_model(inputs, tmp_path):
    """Of others each has its own, or none; a search has the same models as a run."""
    own = [f"{name}.hf_overrides={{max_position_embeddings: 300}}" for name in ("critic", "reward.models.0")]
    budgets = [f"{name}.micro_batch_tokens=400" for name in ("actor", "critic", "reference", "reward.models.0")]
    keys = (BEYOND, *own, *budgets, f"actor.hf_overrides={LONGER}", f"reference.model={inputs / 'policy'}")
    run = load(inputs, tmp_path, *keys)
    specs = {name: model.spec for name, model in run.models.items()}
    assert [spec.max_positions for spec in specs.values()] == [400, 300, 400, 300]
    assert (
        specs["reference"].rope
        == specs["actor"].rope
        == (
            ("rope_type", "yarn"),
            ("rope_theta", 10000.0),
            ("factor", 4.0),
            ("original_max_position_embeddings", 100),
        )
    )
    assert dict(specs["critic"].rope)["rope_type"] == "default"
    assert specs_of(run.config) == specs and specs_of(run.config)["actor"].rope == specs["actor"].rope
    other = problem(inputs, tmp_path, *keys, f"reference.model={inputs / 'reference'}")
    assert other == like(
        "data.max_prompt_length + sampling.max_response_length = 300 exceeds max_position_embeddings = 128 of "
        f"{inputs / 'reference'}. Set sampling.max_response_length=116, or "
        "reference.hf_overrides.max_position_embeddings=300, with rope_parameters there as the model's card says"
    )
    none = problem(inputs, tmp_path, *keys, "reference.hf_overrides={}")
    assert none.startswith("data.max_prompt_length") and "reference.hf_overrides.max_position_embeddings=300" in none


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("{rope_scaling: {rope_type: longrope}}", "rope_type = 'longrope' is not supported: known are default, linear"),
        (
            f"{{rope_scaling: {{rope_type: linear, factor: 4.0}}, rope_parameters: {YARN}}}",
            "rope_scaling = [{'rope_type': 'linear', 'factor': 4.0}] is not supported: rope_parameters differs",
        ),
    ],
)
def test_overrides_that_no_file_may_have_either(inputs, tmp_path, overrides, expected):
    message = problem(inputs, tmp_path, f"critic.hf_overrides={overrides}")
    assert message.startswith(f"critic.hf_overrides: {inputs / 'critic' / 'config.json'}: {expected}")


def test_overrides_of_other_fields(inputs, tmp_path):
    message = problem(inputs, tmp_path, "actor.hf_overrides={hidden_size: 8}")
    assert "actor.hf_overrides.hidden_size: unknown key" in message
    assert "known are max_position_embeddings, rope_parameters, rope_scaling" in message


# ------------------------------------------------------------------------------------------------ the KV cache

# 4 key/value heads of 32 elements, 6 layers, float32: a token takes 2 x 6 x 4 x 32 x 4 = 6,144 bytes; 20 tokens are one
# block of 128 or two of 16, and vLLM has one more
TOKEN, GIB = 6144, 1 << 30
TP1 = ("actor.tensor_parallel_size=1",)


def gib(num_bytes: int) -> str:
    return f"rollout.kv_cache_gib={num_bytes / GIB!r}"


@pytest.mark.parametrize(
    ("keys", "cuda", "least"),
    [
        (TP1, False, 2 * 32 * TOKEN),
        (TP1, True, 3 * 16 * TOKEN),
        (("sampling.max_response_length=21",), True, 4 * 16 * TOKEN // 2),  # 33 tokens; two heads a rank
        (("actor.tensor_parallel_size=4",), False, 2 * 32 * TOKEN // 4),
        ((*TP1, "rollout.pipeline_parallel_size=2"), False, 2 * 32 * TOKEN // 2),
        ((*TP1, "rollout.pipeline_parallel_size=4"), False, 2 * 32 * TOKEN // 3),  # stages of 2, 2, 1, 1 layers
        ((*TP1, "actor.dtype=bfloat16"), False, 2 * 32 * TOKEN // 2),
    ],
)
def test_a_cache_that_just_holds_one_sequence(inputs, tmp_path, keys, cuda, least):
    load(inputs, tmp_path, *keys, gib(least), cuda=cuda)
    message = problem(inputs, tmp_path, *keys, gib(least - 1), cuda=cuda)
    assert message.startswith("rollout.kv_cache_gib = ") and f" = {least:,} bytes. rollout.kv_cache_gib=" in message


def test_a_cache_too_small_for_one_sequence(inputs, tmp_path):
    message = problem(inputs, tmp_path, *TP1, "rollout.kv_cache_gib=0.0002")
    assert message == (
        like(
            "rollout.kv_cache_gib = 0.0002 (214,748 bytes) cannot hold one sequence of data.max_prompt_length + "
            "sampling.max_response_length = 20 tokens. An engine rank needs 2 blocks (1 of them vLLM's own) of 32 "
            "tokens x 2 (keys and values) x 6 layers x 4 key/value heads x head_dim 32 x 4 bytes = 393,216 bytes. "
            "rollout.kv_cache_gib=0.0003663 holds 1 of the longest at a time, rollout.kv_cache_gib=0.0003663 one; with "
            "rollout.kv_cache_gib=null the batch and the free memory decide"
        )
    )
    load(inputs, tmp_path, *TP1, "rollout.kv_cache_gib=0.0003663")


# 4 prompts on two replicas of tp 2, one sample each, of 20 tokens: 2 sequences of one block, or of two, and vLLM's own
@pytest.mark.parametrize(
    ("keys", "cuda", "whole"),
    [
        ((), False, 3 * 32 * TOKEN // 2),
        ((), True, 5 * 16 * TOKEN // 2),
        (("sampling.samples_per_prompt=3",), False, 7 * 32 * TOKEN // 2),
        (("sampling.samples_per_prompt=3", "rollout.max_num_seqs=5"), False, 6 * 32 * TOKEN // 2),
        (("actor.tensor_parallel_size=4",), False, 5 * 32 * TOKEN // 4),
        (("sampling.by_prompt_length=[{up_to: 4, samples_per_prompt: 3}]",), False, 7 * 32 * TOKEN // 2),
    ],
)
def test_by_default_the_cache_holds_the_batch(inputs, tmp_path, keys, cuda, whole):
    run = load(inputs, tmp_path, *keys, "rollout.kv_cache_gib=null", cuda=cuda)
    assert run.kv_cache.of_stage(run.stages, 0) == run.kv_cache.within(whole).whole == whole
    assert run.kv_cache.within(whole - 1).whole == whole - 1


# the same replicas: twice as many rows each as samples, of two blocks of 16 tokens
@pytest.mark.parametrize(
    ("keys", "cuda", "held", "most"),
    [
        (("sampling.samples_per_prompt=200",), True, 400, 400),
        (("sampling.samples_per_prompt=200",), True, 300, 300),  # more would be preempted
        (("sampling.samples_per_prompt=200",), True, 30, 256),
        (("sampling.samples_per_prompt=200",), False, 400, 256),
        (("sampling.samples_per_prompt=600",), True, 1200, 512),  # of a larger step there is no graph
        (("sampling.samples_per_prompt=3",), True, 6, 256),  # an evaluation may have more rows
        (("sampling.samples_per_prompt=200", "rollout.max_num_seqs=64"), True, 400, 64),
        (("sampling.samples_per_prompt=200", "rollout.max_num_seqs=900"), True, 400, 900),
    ],
)
def test_a_step_takes_the_rows_of_a_replica_on_gpus(inputs, tmp_path, keys, cuda, held, most):
    run = load(inputs, tmp_path, *keys, "rollout.kv_cache_gib=null", cuda=cuda)
    cache = replace(run.kv_cache, whole=(held * (2 if cuda else 1) + 1) * run.kv_cache.blocks.size)
    assert cache.sequences(20) == held and run.sequences_of_step(cache) == most


def test_the_default_cache_has_room_for_the_step(inputs, tmp_path):
    """Of 512 rows at a time, no longer of 256."""
    run = load(inputs, tmp_path, "sampling.samples_per_prompt=600", "rollout.kv_cache_gib=null", cuda=True)
    assert run.kv_cache.sequences(20) == 512 == run.sequences_of_step(run.kv_cache)


def test_without_memory_for_one_sequence_that_is_said(inputs, tmp_path):
    run = load(inputs, tmp_path, *TP1, "rollout.kv_cache_gib=null")
    with pytest.raises(
        ConfigError, match=r"the 393,215 bytes that are free .* one sequence of 393,216 bytes\. `hybridflow plan`"
    ):
        run.kv_cache.within(2 * 32 * TOKEN - 1)
    given = load(inputs, tmp_path, *TP1, gib(2 * 32 * TOKEN))
    assert with_room(given, 0) is given, "what is given is taken as it is"


def test_ranks_that_share_a_key_value_head_hold_it_each(inputs, tmp_path):
    policy = shutil.copytree(inputs / "policy", tmp_path / "policy")
    describe(policy, num_key_value_heads=2)
    keys = (f"actor.model={policy}", "actor.tensor_parallel_size=4")
    message = problem(inputs, tmp_path, *keys, gib(2 * 32 * TOKEN // 4 - 1))
    assert "x 1 key/value heads x" in message and f" = {2 * 32 * TOKEN // 4:,} bytes" in message


def test_vllm_has_one_more_block_where_attention_has_a_window(inputs, tmp_path):
    policy = shutil.copytree(inputs / "policy", tmp_path / "policy")
    describe(policy, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=24)
    message = problem(inputs, tmp_path, *TP1, f"actor.model={policy}", gib(3 * 32 * TOKEN - 1))
    assert "3 blocks (2 of them vLLM's own) of 32 tokens" in message


# ------------------------------------------------------------------------------------------------ the output directory


def at(directory: Path, output_dir: Path, inputs: Path) -> ExperimentConfig:
    path = write_config(directory / "config.yaml", inputs)
    return ExperimentConfig.from_yaml(path, [f"output_dir={output_dir}"])


def test_an_output_directory_that_can_be_written_is_left_as_it_was(inputs, tmp_path):
    runs = tmp_path / "runs"
    check_output_dir(at(tmp_path, runs / "of" / "today", inputs))
    assert not runs.exists()
    (runs / "run").mkdir(parents=True)  # an earlier run
    check_output_dir(at(tmp_path, runs, inputs))
    assert [path.name for path in runs.rglob("*")] == ["run"]


@pytest.mark.parametrize("name", ["file", "file/runs", "file/runs/today"])
def test_an_output_directory_below_a_file(inputs, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as raised:
        check_output_dir(at(tmp_path, tmp_path / name, inputs))
    where = tmp_path / "file/runs" if "/" in name else tmp_path / "file"
    assert str(raised.value) == f"output_dir = {tmp_path / name}: cannot write to {where}: Not a directory"


def test_an_output_directory_where_nothing_can_be_put(inputs, tmp_path, monkeypatch):
    """What was made before that was found is gone again."""

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError) as raised:
        check_output_dir(at(tmp_path, tmp_path / "a" / "b", inputs))
    path = tmp_path / "a" / "b"
    assert str(raised.value) == f"output_dir = {path}: cannot write to {path}: No space left on device"
    assert not (tmp_path / "a").exists()


# ------------------------------------------------------------------------------------------------ routing


REPLAY = "algorithm.policy.replay_routing=true"
MIXTURE = "configs/shapes/qwen3-30b-a3b"


def test_routing_is_replayed_by_a_mixture_of_experts_alone(inputs, tmp_path):
    rule = "algorithm.policy.replay_routing = true needs a mixture of experts that chooses at least 2 for a token"
    off = ". Set algorithm.policy.replay_routing=false"
    assert problem(inputs, tmp_path, REPLAY) == f"{rule}: actor.model = {inputs}/policy has no experts{off}"
    few = shutil.copytree(MIXTURE, tmp_path / "few")
    describe(few, num_experts_per_tok=1, vocab_size=100)
    found = problem(inputs, tmp_path, REPLAY, f"actor.model={few}")
    assert found == f"{rule}: actor.model = {few} has num_experts_per_tok = 1{off}"


def test_sizes_of_what_is_replayed(inputs, tmp_path):
    mixture = shutil.copytree(MIXTURE, tmp_path / "mixture")
    describe(mixture, vocab_size=100)
    sizes = load(inputs, tmp_path, REPLAY, f"actor.model={mixture}").routing
    assert sizes == RoutingSizes(num_layers=48, chosen=8, num_experts=128)
    assert sizes.nothing(5).nbytes == 5 * 384, "bytes a token, as docs/models/qwen3-moe.md says"
    assert load(inputs, tmp_path, f"actor.model={mixture}").routing is None


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("actor.expert_parallel_size=2",),
            "actor.expert_parallel_size = 2: {inputs}/policy has no experts. Set actor.expert_parallel_size=1",
        ),
        (
            ("actor.expert_tensor_parallel_size=2",),
            "actor.expert_tensor_parallel_size = 2: {inputs}/policy has no experts. Set "
            "actor.expert_tensor_parallel_size=null",
        ),
    ],
)
def test_a_dense_model_has_no_experts_to_share_out(
    overrides: tuple[str, ...], told: str, inputs: Path, tmp_path: Path
) -> None:
    assert told.format(inputs=inputs) in problem(inputs, tmp_path, *overrides).splitlines()


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"tensor_parallel_size": 4}, "actor.tensor_parallel_size = 4 leaves each expert 4 of moe_intermediate_size"),
        (
            {"tensor_parallel_size": 4, "expert_parallel_size": 3, "expert_tensor_parallel_size": 4},
            "actor.expert_parallel_size = 3 does not divide the number of experts = 4",
        ),
        (
            {"tensor_parallel_size": 1, "expert_tensor_parallel_size": 4},
            "actor.expert_tensor_parallel_size = 4 leaves each expert 4 of moe_intermediate_size",
        ),
    ],
    ids=str,
)
def test_experts_that_cannot_be_cut_are_told_by_the_key_that_cuts_them(
    sizes: dict[str, int], told: str, inputs: Path, tmp_path: Path
) -> None:
    shutil.copytree(inputs / "policy", tmp_path / "mixture")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    described = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8, **experts}
    describe(tmp_path / "mixture", **described)
    overrides = [f"actor.model={tmp_path / 'mixture'}", "actor.sequence_parallel=false"]
    overrides += [f"actor.{key}={value}" for key, value in sizes.items()]
    if sizes.get("expert_parallel_size", 1) > 1:
        overrides[1] = "actor.sequence_parallel=true"
    assert told in problem(inputs, tmp_path, *overrides)
