"""The weight table: names and shapes against transformers, complete and unique; where weights lie and are stored."""

import pytest
import torch
import transformers

from hybridflow.architecture.families import BY_NAME
from hybridflow.architecture.family import WRAPPER
from hybridflow.architecture.layer_kinds import DENSE
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ARCHITECTURES, ModelSpec, read_spec
from hybridflow.architecture.weights import (
    canonical_name,
    layer_weights,
    model_weights,
    num_parameters,
    staged_weights,
    stored_at,
)
from tests.architecture.test_parts import tiny_spec
from tests.tiny_models import FAMILIES, TEXT, by_checkpoint_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.3.mlp.linear_fc2.weight", "decoder.layers.3.mlp.linear_fc2.weight"),
        ("module.module.output_layer.weight", "output_layer.weight"),
        (
            "module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.0.input_layernorm.weight",
        ),
        ("decoder.layers.11.mlp.linear_fc1.layer_norm_weight", "decoder.layers.11.pre_mlp_layernorm.weight"),
        ("decoder.layers.11.mlp.linear_fc1.weight", "decoder.layers.11.mlp.linear_fc1.weight"),
    ],
)
def test_canonical_name(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


def test_for_layer_fills_every_name() -> None:
    weight = next(w for w in layer_weights(tiny_spec(), DENSE) if "linear_fc1" in w.megatron).for_layer(7)
    assert weight.megatron == "decoder.layers.7.mlp.linear_fc1.weight"
    assert weight.hf == ("model.layers.7.mlp.gate_proj.weight", "model.layers.7.mlp.up_proj.weight")
    assert weight.engine == "model.layers.7.mlp.gate_up_proj.weight"
    assert weight.split is Split.GATED


HF_SIZES = dict(
    hidden_size=24,
    intermediate_size=20,
    ffn_dim=20,
    word_embed_proj_dim=24,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=70,
    num_hidden_layers=2,
    num_labels=1,
    pad_token_id=3,
)


OPT_KINDS = (
    {"do_layer_norm_before": False},
    {"word_embed_proj_dim": 10},
    {"do_layer_norm_before": False, "word_embed_proj_dim": 10},
)
# of wrappers, whose language model is one of the others: tests/tools/convert/test_wrappers.py
PLAIN = [architecture for architecture in ARCHITECTURES if not architecture.endswith(WRAPPER)]
MODELS = [(architecture, {}) for architecture in PLAIN if hasattr(transformers, architecture)]
MODELS += [(f"OPTFor{what}", changes) for what in ("CausalLM", "SequenceClassification") for changes in OPT_KINDS]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("architecture", "changes"), MODELS)
def test_the_table_lists_every_parameter_of_transformers_once(
    architecture: str, changes: dict, tied: bool, tmp_path
) -> None:
    prefix, head = ARCHITECTURES[architecture]
    family = next(name for name, (its_prefix, _) in FAMILIES.items() if its_prefix == prefix)
    own = {"head_dim": 4} if prefix in ("Llama", "Mistral", "Qwen3", "Glm", "Mixtral", "Qwen3Moe") else {}
    config = getattr(transformers, TEXT.get(prefix, prefix) + "Config")(
        **(HF_SIZES | own | FAMILIES[family][1] | changes), tie_word_embeddings=tied, architectures=[architecture]
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    spec = read_spec(tmp_path)
    assert (spec.family, spec.head, spec.tied) == (family, head, tied and head == "lm")
    listed = [
        (name, shape)
        for weight in model_weights(spec, head)
        for name, shape in zip(weight.hf, weight.shapes(spec), strict=True)
    ]
    frozen = {name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}
    expected = by_checkpoint_name(dict(model.named_parameters()) | frozen, family)
    assert sorted(listed) == sorted((name, tuple(x.shape)) for name, x in expected.items())
    assert num_parameters(spec, head) == model.num_parameters() + sum(x.numel() for x in frozen.values())


def test_opt_350m_has_as_many_parameters_as_published() -> None:
    """331 196 416, by huggingface.co/facebook/opt-350m."""
    sizes = dict(num_layers=24, hidden_size=1024, ffn_hidden_size=4096, num_heads=16, num_kv_heads=16, head_dim=64)
    published = dict(vocab_size=50272, max_positions=2048, tied=True, projected_size=512, post_norm=True)
    spec = tiny_spec(family="opt", num_experts=0, **sizes, **published)
    assert num_parameters(spec, "lm") == 331_196_416
    ends = [weight.engine for weight in model_weights(spec, "score") if "layers." not in weight.engine]
    assert ends == [
        "model.decoder.embed_tokens.weight",
        "model.decoder.project_in.weight",
        "model.decoder.embed_positions.weight",
        "model.decoder.project_out.weight",
        "score.weight",
    ]


def test_the_first_stage_that_holds_each_weight() -> None:
    """Of interleaved stages: layers 0 and 2 on the first, 1 and 3 on the second."""
    spec = tiny_spec(num_layers=4)
    staged = {weight.engine: stage for weight, stage in staged_weights(spec, "lm", [(0, 2), (1, 3)])}
    assert list(staged) == [weight.engine for weight in model_weights(spec, "lm")]
    assert {name: stage for name, stage in staged.items() if "layers" not in name or "down_proj" in name} == {
        "model.embed_tokens.weight": 0,
        "model.layers.0.mlp.down_proj.weight": 0,
        "model.layers.1.mlp.down_proj.weight": 1,
        "model.layers.2.mlp.down_proj.weight": 0,
        "model.layers.3.mlp.down_proj.weight": 1,
        "model.norm.weight": 1,
        "lm_head.weight": 1,
    }
    tied = tiny_spec(num_layers=4, tied=True)
    assert [name for name in staged if name != "lm_head.weight"] == [
        weight.engine for weight, _ in staged_weights(tied, "lm", [(0, 2), (1, 3)])
    ]


def spec_of(family: str) -> ModelSpec:
    return (
        tiny_spec(family="opt", projected_size=10, post_norm=True) if family == "opt_350m" else tiny_spec(family=family)
    )


@pytest.mark.parametrize("family", [*BY_NAME, "opt_350m"])
def test_names_of_megatron_and_engine_are_unique(family: str) -> None:
    weights = list(model_weights(spec_of(family), "lm"))
    assert len({weight.megatron for weight in weights}) == len({weight.engine for weight in weights}) == len(weights)
    assert len({stored_at(weight) for weight in weights}) == len(weights)


@pytest.mark.parametrize(
    ("family", "megatron", "stored"),
    [
        ("llama", "embedding.word_embeddings.weight", ("embedding.word_embeddings.weight", None)),
        (
            "llama",
            "decoder.layers.1.input_layernorm.weight",
            ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", 1),
        ),
        ("opt", "decoder.layers.1.pre_mlp_layernorm.bias", ("decoder.layers.mlp.linear_fc1.layer_norm_bias", 1)),
        ("opt", "decoder.layers.0.mlp.linear_fc1.bias", ("decoder.layers.mlp.linear_fc1.bias", 0)),
        ("opt_350m", "decoder.layers.1.post_mlp_layernorm.bias", ("decoder.layers.post_mlp_layernorm.bias", 1)),
        ("opt_350m", "project_out.weight", ("project_out.weight", None)),
        ("mixtral", "decoder.layers.1.pre_mlp_layernorm.weight", ("decoder.layers.pre_mlp_layernorm.weight", 1)),
        (
            "mixtral",
            "decoder.layers.1.mlp.experts.linear_fc2.weight",
            ("decoder.layers.mlp.experts.experts.linear_fc2.weight", 1),
        ),
    ],
)
def test_where_a_checkpoint_stores_a_weight(family: str, megatron: str, stored: tuple[str, int | None]) -> None:
    [weight] = [w for w in model_weights(spec_of(family), "lm") if w.megatron == megatron]
    assert stored_at(weight) == stored
