"""Latent attention and experts in groups in config.json: what is read, what is refused, what engines are told."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.architecture.adapter_weights import is_linear, modules_of
from hybridflow.architecture.layer_kinds import LatentSizes
from hybridflow.architecture.spec import ModelSpec, config_changes, read_spec
from hybridflow.architecture.weights import layer_weights
from hybridflow.errors import CheckpointError
from tests.architecture.test_missing_keys import complete

SHAPES = Path(__file__).resolve().parents[2] / "configs" / "shapes"


def spec_with(directory: Path, family: str = "deepseek_v3", **changes: Any) -> ModelSpec:
    tree = {key: value for key, value in (complete(family) | changes).items() if value != "missing"}
    (directory / "config.json").write_text(json.dumps(tree))
    return read_spec(directory)


@pytest.mark.parametrize(
    ("shape", "sizes", "groups", "dense"),
    [
        ("deepseek-v3", LatentSizes(1536, 512, 128, 64, value_dim=128), (8, 4), 3),
        ("kimi-k2", LatentSizes(1536, 512, 128, 64, value_dim=128), (1, 1), 1),
        ("moonlight-16b-a3b", LatentSizes(None, 512, 128, 64, value_dim=128), (1, 1), 1),
        ("glm-4.7-flash", LatentSizes(768, 512, 192, 64, value_dim=256), (1, 1), 1),
    ],
)
def test_published_models(shape: str, sizes: LatentSizes, groups: tuple[int, int], dense: int) -> None:
    spec = read_spec(SHAPES / shape)
    assert spec.latent == sizes and sizes.cached == 576
    assert (*spec.router[2:], spec.num_dense_layers) == (*groups, dense)
    assert spec.block_fp8 == (shape in ("deepseek-v3", "kimi-k2"))
    rotary = spec.rotary()
    assert rotary is not None and len(rotary.frequencies) == 32 and rotary.factor == 1


def test_yarn_scales_products_of_queries_and_keys() -> None:
    """By 0.1 ln 40 + 1, squared, of DeepSeek-V3; Moonlight has plain angles."""
    assert read_spec(SHAPES / "deepseek-v3").attention_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert read_spec(SHAPES / "moonlight-16b-a3b").attention_scale == 192**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 2048}, "sparse attention"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "sparse attention"),
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, "sparse attention"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "softmax over groups"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"rope_interleave": False}, "rope_interleave = False is not supported"),
        ({"rope_interleave": None}, "rope_interleave = None is not supported"),
        ({"is_causal": False}, "is_causal = False is not supported: attention must be causal"),
        ({"mlp_layer_types": 5}, "mlp_layer_types = 5 is not supported: must be a list"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "quantised weights"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ({"num_key_value_heads": 8}, "num_key_value_heads = 8 is not supported: must be 64"),
        ({"q_lora_rank": "missing"}, "q_lora_rank = None is not supported: must be there"),
        ({"kv_lora_rank": "missing"}, "kv_lora_rank = None is not supported"),
        ({"v_head_dim": 81}, "v_head_dim = 81 is not supported: must be at most 80"),
        ({"n_group": 3}, "n_group = 3 is not supported: must divide 8 experts"),
        ({"n_group": None}, "n_group = None is not supported"),
        ({"topk_group": 5}, "topk_group = 5 is not supported: must be a whole number from 1 to 4"),
        ({"topk_group": 1}, "topk_group = 1 is not supported: 1 x 2 experts, a token has 4"),
        ({"n_group": 8, "topk_group": 8}, "n_group = 8 is not supported: groups of 1 experts"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear' is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "mscale of rope_type yarn = 1.0 is not supported: must come with mscale_all_dim",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0}},
            "attention_factor of rope_type yarn = 1.0 is not supported",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        spec_with(tmp_path, **changes)
    assert message in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def test_dense_layers_of_either_name(tmp_path: Path) -> None:
    """transformers 5 has the kind of each layer, vLLM how many of the first are dense."""
    kinds = ["dense", "dense", "sparse"]
    found = spec_with(tmp_path, "glm4_moe_lite", mlp_layer_types=kinds, first_k_dense_replace="missing")
    assert found.num_dense_layers == 2 and found.engine_fields["first_k_dense_replace"] == 2
    with pytest.raises(CheckpointError, match="mlp_layer_types has 2 dense layers"):
        spec_with(tmp_path, "glm4_moe_lite", mlp_layer_types=kinds, first_k_dense_replace=1)
    with pytest.raises(CheckpointError, match="dense layers among layers of experts"):
        spec_with(tmp_path, "glm4_moe_lite", mlp_layer_types=["dense", "sparse", "dense"])


def test_what_engines_and_exports_are_told(tmp_path: Path) -> None:
    """transformers 5 writes none of the first three, and vLLM would route by a softmax without a bias."""
    spec = spec_with(tmp_path, num_nextn_predict_layers=1)
    told = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1}
    assert spec.engine_fields == told | {"moe_router_dtype": "float32"}
    assert config_changes(spec, "lm").items() >= (told | {"num_nextn_predict_layers": 0}).items()
    assert spec_with(tmp_path, "glm4_moe_lite").engine_fields == told
    assert spec_with(tmp_path, "glm4_moe").engine_fields == {}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("deepseek_v3", {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"}),
        ("moonlight", {"q_proj", "kv_a_proj_with_mqa", "o_proj"}),
    ],
)
def test_adapters_go_to_all_but_what_the_engine_multiplies_in(family: str, expected: set[str], tmp_path: Path) -> None:
    spec = spec_with(tmp_path, family)
    weights = [weight for weight in layer_weights(spec, spec.layer_kind(0)) if is_linear(weight)]
    names = {module.rpartition(".")[2] for weight in weights for module in modules_of(weight) if "attn" in module}
    assert names == expected
