"""Arguments that a config hands on to vLLM and megatron-core: those of a list, by the vendors' own names."""

import dataclasses
from typing import get_args

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridflow.config import ExperimentConfig
from hybridflow.config.vendor_arguments import EngineArguments, MegatronArguments, PassName
from hybridflow.errors import ConfigError
from hybridflow.rollout.device import CudaEngine
from hybridflow.rollout.engine import with_given
from tests.launch import ROOT

CONFIG = ROOT / "configs" / "quickstart_grpo.yaml"


def read(*overrides: str) -> ExperimentConfig:
    return ExperimentConfig.from_yaml(CONFIG, list(overrides))


def test_the_names_are_the_vendors_own() -> None:
    from vllm.config.compilation import PassConfig
    from vllm.engine.arg_utils import EngineArgs

    for ours, theirs in ((EngineArguments, EngineArgs), (MegatronArguments, TransformerConfig)):
        assert ours.model_fields.keys() <= {field.name for field in dataclasses.fields(theirs)}
    assert set(get_args(PassName)) == {field.name for field in dataclasses.fields(PassConfig) if field.type is bool}


def test_passes_of_the_compiler_are_handed_on_and_one_is_off() -> None:
    """FlashInfer's sum and norm in one, on GPUs."""
    settings = CudaEngine().settings(eager=False, sleeps=True, block_tokens=16)
    assert with_given(settings, read().rollout.engine_arguments.given()) == settings
    assert settings["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}
    asked = read("rollout.engine_arguments={compilation_config: {pass_config: {eliminate_noops: false}}}")
    given = with_given(settings, asked.rollout.engine_arguments.given())
    assert given == settings | {
        "compilation_config": {"pass_config": {"fuse_allreduce_rms": False, "eliminate_noops": False}}
    }
    wanted = read("rollout.engine_arguments={compilation_config: {pass_config: {fuse_allreduce_rms: true}}}")
    assert with_given(settings, wanted.rollout.engine_arguments.given())["compilation_config"] == {
        "pass_config": {"fuse_allreduce_rms": True}
    }


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
            "rollout.engine_arguments={compilation_config: {pass_config: {fuse: true}}}",
            "rollout.engine_arguments.compilation_config.pass_config",
        ),
        (
            "rollout.engine_arguments={quantization: fp8}",
            "engine_arguments.quantization: unknown key; FP8 and other quantised",
        ),
        ("rollout.engine_arguments={max_num_seqs: 8}", "rollout.engine_arguments.max_num_seqs: unknown key"),
        ("rollout.engine_arguments={optimization_level: 9}", "rollout.engine_arguments.optimization_level = 9: "),
        (
            "actor.megatron_arguments={overlap_p2p_comm: true, batch_p2p_comm: true}",
            "actor.megatron_arguments: overlap_p2p_comm = true cannot go with batch_p2p_comm = true",
        ),
        ("actor.megatron_arguments={fp8: hybrid}", "actor.megatron_arguments.fp8: unknown key; FP8 and"),
        ("actor.megatron_arguments={overlap_p2p_comm: 7}", "actor.megatron_arguments.overlap_p2p_comm = 7: "),
    ],
)
def test_all_others_are_refused(override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(override)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.engine_arguments={quantization: fp8}", "rollout.engine_arguments.quantization: unknown key; "),
        (
            "rollout.engine_arguments={kv_cache_dtype: fp8_e5m2}",
            "rollout.engine_arguments.kv_cache_dtype: unknown key; ",
        ),
        ("rollout.kv_cache_dtype=fp8", "rollout.kv_cache_dtype: unknown key; "),
        ("rollout.engine_arguments={calculate_kv_scales: true}", "rollout.engine_arguments.calculate_kv_scales: unkn"),
        ("actor.megatron_arguments={fp8: hybrid}", "actor.megatron_arguments.fp8: unknown key; "),
        ("reference.megatron_arguments={fp8_recipe: mxfp8}", "reference.megatron_arguments.fp8_recipe: unknown key; "),
        ("actor.megatron_arguments={fp4: e2m1}", "actor.megatron_arguments.fp4: unknown key; "),
        ("actor.megatron={override_transformer_config: {fp8_param: true}}", "fp8_param: unknown key; "),
        ("actor.load_in_8bit=true", "actor.load_in_8bit: unknown key; "),
        ("actor.dtype=fp8", "actor.dtype = 'fp8': input should be 'float32' or 'bfloat16'; "),
        ("actor.dtype=float8_e4m3fn", "actor.dtype = 'float8_e4m3fn': "),
        ("generation={vllm_cfg: {quantization_config: {bits: 8}}}", "quantization_config"),
    ],
)
def test_fp8_is_refused_with_the_reason(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(override)
    assert key in str(refused.value) and "FP8 and other quantised formats are not supported" in str(refused.value)


@pytest.mark.parametrize("override", ["actor.dtype=float64", "actor.lr8=1", "rollout.engine_arguments={dtype: half}"])
def test_other_mistakes_are_not_taken_for_fp8(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(override)
    assert "quantised" not in str(refused.value)


def test_the_kernel_of_attention_is_one_of_two() -> None:
    config = read("actor.megatron_arguments={attention_backend: fused}")
    assert config.vendor_lines() == ["actor.megatron_arguments: attention_backend=fused"]
    with pytest.raises(ConfigError, match="attention_backend = 'unfused': input should be 'flash' or 'fused'"):
        read("actor.megatron_arguments={attention_backend: unfused}")
