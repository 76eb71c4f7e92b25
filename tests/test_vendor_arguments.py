"""Arguments that a config hands on to vLLM and megatron-core: those of a list, by the vendors' own names."""

import dataclasses

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridflow.config import ExperimentConfig
from hybridflow.config.vendor_arguments import EngineArguments, MegatronArguments
from hybridflow.errors import ConfigError
from tests.launch import ROOT

CONFIG = ROOT / "configs" / "quickstart_grpo.yaml"


def read(*overrides: str) -> ExperimentConfig:
    return ExperimentConfig.from_yaml(CONFIG, list(overrides))


def test_the_names_are_the_vendors_own() -> None:
    from vllm.engine.arg_utils import EngineArgs

    for ours, theirs in ((EngineArguments, EngineArgs), (MegatronArguments, TransformerConfig)):
        assert ours.model_fields.keys() <= {field.name for field in dataclasses.fields(theirs)}


def test_what_is_handed_on_is_told() -> None:
    config = read("rollout.engine_arguments={watermark: 0.02}", "actor.megatron_arguments={batch_p2p_comm: true}")
    assert config.rollout.engine_arguments.given() == {"watermark": 0.02}
    assert config.vendor_lines() == [
        "actor.megatron_arguments: batch_p2p_comm=True",
        "rollout.engine_arguments: watermark=0.02",
    ]
    assert read().vendor_lines() == [] and read().actor.megatron_arguments.given() == {}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "rollout.engine_arguments={quantization: fp8}",
            "engine_arguments.quantization: unknown key",
        ),
        ("rollout.engine_arguments={max_num_seqs: 8}", "rollout.engine_arguments.max_num_seqs: unknown key"),
        ("rollout.engine_arguments={optimization_level: 9}", "rollout.engine_arguments.optimization_level = 9: "),
        (
            "actor.megatron_arguments={overlap_p2p_comm: true, batch_p2p_comm: true}",
            "actor.megatron_arguments: overlap_p2p_comm and batch_p2p_comm: megatron-core has no schedule with both",
        ),
        ("actor.megatron_arguments={fp8: hybrid}", "actor.megatron_arguments.fp8: unknown key; known are"),
        ("actor.megatron_arguments={overlap_p2p_comm: 7}", "actor.megatron_arguments.overlap_p2p_comm = 7: "),
    ],
)
def test_all_others_are_refused(override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(override)
    assert problem in str(refused.value)
