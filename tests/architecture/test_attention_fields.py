"""Which layers have windows, and what queries and keys are turned by: published config.json files, and refused ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from hybridflow.architecture.rope import QueryGrowth
from hybridflow.architecture.sharing import check_parallel
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.rollout.language_model import LanguageModel

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 8, "vocab_size": 100, "rms_norm_eps": 1e-6},
}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 16, **SIZES}
OLD_ROPE = {
    **{"rope_theta": 1000000.0, "rope_local_base_freq": 5000.0},
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_key_value_heads": 8},
    "ministral3": {
        **{"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"},
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
    },
}


def read(directory: Path, tree: dict[str, Any], **changes: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps({**SIZES, **tree, **changes}))
    return read_spec(directory)


def test_layers_of_gemma_by_the_interval_and_by_their_names(tmp_path: Path) -> None:
    by_default = ("window",) * 5 + ("attention",)
    assert read(tmp_path, GEMMA).mixers == by_default
    assert read(tmp_path, GEMMA, sliding_window_pattern=2).mixers == ("window", "attention") * 3
    named = ["full_attention", *["sliding_attention"] * 5]
    assert read(tmp_path, GEMMA, layer_types=named).mixers == ("attention", *["window"] * 5)


@pytest.mark.parametrize("keys", [OLD_ROPE, {}], ids=["old keys", "none"])
def test_both_rotary_embeddings_of_gemma_are_those_of_transformers(keys: dict, tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA, **keys)
    theirs = Gemma3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    of_full, of_windows = spec.rotary(), spec.window_rotary()
    assert of_full is not None and of_windows is not None
    assert torch.equal(of_full.frequencies, theirs.full_attention_inv_freq)
    assert torch.equal(of_windows.frequencies, theirs.sliding_attention_inv_freq)
    assert not torch.equal(of_full.frequencies, of_windows.frequencies)
    assert dict(spec.rope)["rope_theta"] == 1e6
    assert dict(spec.window_rope)["rope_theta"] == (5000.0 if keys else 10000.0)


def test_numbers_that_gemmas_file_may_leave_out(tmp_path: Path) -> None:
    less = {key: x for key, x in GEMMA.items() if key not in ("num_attention_heads", "vocab_size", "rms_norm_eps")}
    (tmp_path / "config.json").write_text(json.dumps(less))
    spec = read_spec(tmp_path)
    assert (spec.num_heads, spec.vocab_size, spec.norm_eps, spec.attention_scale) == (8, 262208, 1e-6, 1 / 16)


@pytest.mark.parametrize(
    ("family", "window", "mixers"),
    [
        ("phi3", None, ()),
        ("phi3", 16, ("window",) * 6),
        ("ministral3", None, ()),
        ("olmo3", 16, ("window",) * 3 + ("attention",) + ("window",) * 2),
        ("smollm3", None, ("attention",) * 3 + ("unturned",) + ("attention",) * 2),
    ],
)
def test_layers_of_other_families(family: str, window: int | None, mixers: tuple, tmp_path: Path) -> None:
    assert read(tmp_path, OTHERS[family], sliding_window=window).mixers == mixers


def test_layers_without_rotary_embedding_by_name(tmp_path: Path) -> None:
    spec = read(tmp_path, OTHERS["smollm3"], no_rope_layers=[0, 1, 1, 1, 0, 1])
    assert [i for i, mixer in enumerate(spec.mixers) if mixer == "unturned"] == [0, 4]


def test_sequences_may_be_longer_than_a_window_that_is_one(tmp_path: Path) -> None:
    for tree in (GEMMA, OTHERS["phi3"], {**OTHERS["olmo3"], "max_position_embeddings": 4096}):
        read(tmp_path, tree, sliding_window=16).check_length(1024)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    with pytest.raises(ConfigError, match="exceeds sliding_window = 16"):
        read(tmp_path, mistral, sliding_window=16).check_length(17)


def test_growth_of_queries_goes_to_the_engine_under_its_name(tmp_path: Path) -> None:
    spec = read(tmp_path, OTHERS["ministral3"])
    assert spec.query_growth == QueryGrowth(0.1, 64)
    overrides = LanguageModel.of(spec).arguments("cpu", prefix_caching=True)["hf_overrides"]
    assert overrides["llama_4_scaling"] == {"original_max_position_embeddings": 64, "beta": 0.1}
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta = None is not supported"):
        read(tmp_path, OTHERS["ministral3"], rope_parameters=YARN)
    with pytest.raises(CheckpointError, match="rope_parameters = None is not supported: must be given"):
        read(tmp_path, OTHERS["ministral3"], rope_parameters=None)


def test_ranks_cannot_share_a_norm_over_all_heads_further_than_its_heads(tmp_path: Path) -> None:
    spec = read(tmp_path, OTHERS["olmo3"], num_key_value_heads=2)
    check_parallel(spec, "actor.tensor_parallel_size", 2)
    with pytest.raises(ConfigError, match=r"actor\.tensor_parallel_size = 4 exceeds num_key_value_heads = 2"):
        check_parallel(spec, "actor.tensor_parallel_size", 4)


@pytest.mark.parametrize(
    ("tree", "changes", "message"),
    [
        (GEMMA, {"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM' is not supported: scores and logits"),
        (GEMMA, {"architectures": ["Gemma3nForConditionalGeneration"]}, "embeddings of each layer \\(PLE\\)"),
        (GEMMA, {"architectures": ["Gemma4ForCausalLM"]}, "embeddings of each layer \\(PLE\\)"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
        (GEMMA, {"sliding_window": None}, "sliding_window = None is not supported"),
        (GEMMA, {"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
        (GEMMA, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters = .* is not supported: must have full"),
        (GEMMA, {"rope_parameters": {"full_attention": "linear"}}, "rope_parameters.full_attention = 'linear' is not"),
        (GEMMA, {"rope_scaling": "linear"}, "rope_scaling = 'linear' is not supported: must be an object"),
        (GEMMA, {"layer_types": [["full_attention"]] * 6}, "layer_types.0 = .* is not supported: must be full"),
        (OTHERS["olmo3"], {"rope_theta": 1e6}, "rope_theta = 1000000.0 is not supported: transformers takes 500000.0"),
        (GEMMA, {"layer_types": ["full_attention"] * 5}, "layer_types = .* has 5 entries for 6 layers"),
        (OTHERS["smollm3"], {"no_rope_layers": [1, 2, 1, 1, 1, 1]}, "no_rope_layers = .* is not supported"),
        (OTHERS["smollm3"], {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        (
            OTHERS["smollm3"],
            {"layer_types": ["sliding_attention"] * 6},
            "layer_types.0 = 'sliding_attention' is not supported",
        ),
        (OTHERS["smollm3"], {"layer_types": 5}, "layer_types = 5 is not supported: must be a list"),
        (OTHERS["phi3"], {"rope_scaling": YARN}, "rope_type = 'yarn' is not supported: must be default"),
        (OTHERS["phi3"], {"rope_scaling": {"type": "longrope"}}, "rope_type = 'longrope' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tree: dict, changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, tree, **changes)
