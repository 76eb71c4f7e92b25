"""What is checked of models when a run starts: each role's layout and the engine's against config.json, by message."""

import json
import shutil
from pathlib import Path

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.config import ExperimentConfig
from hybridflow.data.inputs import load_inputs
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import RolloutLayout
from hybridflow.reshard.groups import rollout_of
from tests.distributed.tiny_experiment import make_inputs, write_config

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


def load(inputs: Path, directory: Path, *overrides: str) -> ExperimentConfig:
    """A config that fits four ranks, its inputs loaded."""
    path = write_config(directory / "config.yaml", inputs)
    config = ExperimentConfig.from_yaml(path, ["algorithm.mini_batch_size=4", *overrides])
    config.check_world_size(WORLD_SIZE)
    load_inputs(config, WORLD_SIZE)
    return config


def problem(inputs: Path, directory: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(inputs, directory, *overrides)
    return str(raised.value)


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
        ("actor.ranks=[0, 2]", "rollout.ranks=[2, 4]", "rollout.tensor_parallel_size=1"),
    ],
)
def test_layouts_that_suit_the_models(inputs, tmp_path, overrides):
    config = load(inputs, tmp_path, *overrides)
    num_layers = read_spec(config.actor.model).num_layers
    layout, stages = rollout_of(config, num_layers, WORLD_SIZE)
    assert layout.ranks == config.rollout_ranks(WORLD_SIZE)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize(
    ("overrides", "model", "expected"),
    [
        (
            ("actor.tensor_parallel_size=1", "actor.pipeline_parallel_size=4"),
            "policy",
            "actor.pipeline_parallel_size = 4 and num_hidden_layers = 6 of {}: 6 layers cannot be cut into 4 pipeline "
            "stages: 6 are left for 4 equal stages",
        ),
        (
            ("reference.pipeline_parallel_size=2", "reference.virtual_pipeline_parallel_size=2"),
            "reference",
            "reference.pipeline_parallel_size = 2, reference.virtual_pipeline_parallel_size = 2 and num_hidden_layers "
            "= 6 of {}: the 3 layers of pipeline stage 0 cannot be cut into 2 model chunks: 3 = 1 x 2 + 1",
        ),
        (
            ("critic.pipeline_parallel_size=4", "critic.num_layers_in_first_pipeline_stage=2"),
            "critic",
            "critic.pipeline_parallel_size = 4, critic.num_layers_in_first_pipeline_stage = 2 and num_hidden_layers = "
            "6 of {}: 6 layers cannot be cut into 4 pipeline stages: 4 are left for 3 equal stages beside the stages "
            "of [2]",
        ),
        (
            ("reward.models.0.pipeline_parallel_size=2", "reward.models.0.num_layers_in_last_pipeline_stage=6"),
            "reward",
            "reward.models.0.pipeline_parallel_size = 2, reward.models.0.num_layers_in_last_pipeline_stage = 6 and "
            "num_hidden_layers = 6 of {}: 6 layers cannot be cut into 2 pipeline stages: 0 are left for 1 equal stages "
            "beside the stages of [6]",
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
        f"rollout.tensor_parallel_size = 2 does not divide num_attention_heads = 9 of {policy}: 9 = 4 x 2 + 1"
    )
    describe(policy, num_attention_heads=12, num_key_value_heads=6)
    keys = (f"actor.model={policy}", "actor.tensor_parallel_size=1", "rollout.tensor_parallel_size=4")
    assert problem(inputs, tmp_path, *keys) == (
        f"rollout.tensor_parallel_size = 4 neither divides num_key_value_heads = 6 of {policy} nor is a multiple of "
        "it: 6 = 1 x 4 + 2"
    )


def test_layers_that_do_not_fill_the_engines_stages(inputs, tmp_path):
    policy = shutil.copytree(inputs / "policy", tmp_path / "policy")
    describe(policy, num_hidden_layers=3)
    keys = (f"actor.model={policy}", "actor.tensor_parallel_size=1", "rollout.pipeline_parallel_size=4")
    assert problem(inputs, tmp_path, *keys) == (
        "rollout.pipeline_parallel_size = 4 exceeds num_hidden_layers = 3: a stage needs a layer"
    )


def test_where_the_engine_runs(inputs, tmp_path):
    """On the actor's ranks, at the intervals of its cut; on ranks of its own, neighbours together."""
    spec = read_spec(inputs / "policy")
    config = load(inputs, tmp_path, "rollout.tensor_parallel_size=1", "rollout.pipeline_parallel_size=2")
    layout, stages = rollout_of(config, spec.num_layers, WORLD_SIZE)
    assert stages == ((0, 1, 2), (3, 4, 5))
    assert layout == RolloutLayout(1, 2, ((0, 2), (1, 3)))
    config = load(inputs, tmp_path, "actor.ranks=[[0, 1], [2, 3]]", "rollout.ranks=[[1, 2], [3, 4]]")
    layout, stages = rollout_of(config, spec.num_layers, WORLD_SIZE)
    assert stages == ((0, 1, 2, 3, 4, 5),)
    assert layout == RolloutLayout(2, 1, ((1, 3),))
