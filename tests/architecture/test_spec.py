"""read_spec on configs that transformers wrote, and everything it refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from hybridflow.architecture.layer_kinds import RouterSizes
from hybridflow.architecture.sharing import check_expert_shares, check_experts, check_parallel
from hybridflow.architecture.spec import ARCHITECTURES, ModelSpec, read_spec
from hybridflow.errors import CheckpointError, ConfigError
from tests.messages import like

SIZES = dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=70,
    rms_norm_eps=1e-5,
    max_position_embeddings=100,
)


def hf_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> transformers.PreTrainedConfig:
    family = architecture.partition("For")[0]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    config.architectures = [architecture]
    return config


def hf_model(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    return getattr(transformers, config.architectures[0])(config)


def written(path: Path, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """A Llama's directory with `changes` made to its config.json."""
    hf_config().save_pretrained(path)
    file = path / "config.json"
    raw = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in raw.items() if key not in without}))
    return path


def expected_spec(path: Path, **changes: Any) -> ModelSpec:
    fields = dict(
        path=path,
        family="llama",
        head="lm",
        num_layers=3,
        hidden_size=48,
        ffn_hidden_size=40,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=70,
        norm_eps=1e-5,
        tied=False,
        max_positions=100,
    )
    config = path / "config.json"  # where some families name a pad token by themselves
    named = json.loads(config.read_text()) if config.is_file() else {}
    return ModelSpec(**{**fields, "pad_token_id": named.get("pad_token_id"), **changes})


# --------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("architecture", "config", "fields"),
    [
        ("LlamaForCausalLM", {}, {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 16}, {"tied": True, "head_dim": 16}),
        ("LlamaForSequenceClassification", {"tie_word_embeddings": True}, {"head": "score"}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}, {"family": "qwen2", "tied": True}),
        ("Qwen2ForSequenceClassification", {}, {"family": "qwen2", "head": "score"}),
        ("MistralForCausalLM", {}, {"family": "mistral", "sliding_window": 4096}),
        ("MistralForCausalLM", {"sliding_window": None}, {"family": "mistral"}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, {"family": "qwen2", "sliding_window": 4096}),
        ("Qwen3ForCausalLM", {"head_dim": 16}, {"family": "qwen3", "head_dim": 16}),
        ("GlmForCausalLM", {"head_dim": 16}, {"family": "glm", "head_dim": 16, "rotary_dim": 8}),
        (
            "OPTForCausalLM",
            {"ffn_dim": 40, "word_embed_proj_dim": 48},
            {"family": "opt", "num_kv_heads": 6, "tied": True},
        ),
        (
            "OPTForCausalLM",
            {"ffn_dim": 40, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
            {"family": "opt", "num_kv_heads": 6, "tied": True, "projected_size": 24, "post_norm": True},
        ),
        (
            "OPTForSequenceClassification",
            {"ffn_dim": 40, "word_embed_proj_dim": None, "do_layer_norm_before": False},
            {"family": "opt", "head": "score", "num_kv_heads": 6, "post_norm": True},
        ),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 3},
            {"family": "mixtral", "num_experts": 4, "experts_per_token": 3},
        ),
        (
            "Qwen3MoeForCausalLM",
            {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16},
            {
                "family": "qwen3_moe",
                "head_dim": 16,
                "num_experts": 4,
                "experts_per_token": 3,
                "router": RouterSizes(normalizes=False),
            },
        ),
    ],
)
def test_what_transformers_writes(
    architecture: str, config: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    hf_config(architecture, **config).save_pretrained(tmp_path)
    assert read_spec(tmp_path) == read_spec(str(tmp_path)) == expected_spec(tmp_path, **fields)


def test_fields_that_older_files_leave_out(tmp_path: Path) -> None:
    left_out = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "max_position_embeddings", "rope_parameters")
    spec = read_spec(written(tmp_path, without=left_out))
    assert spec == expected_spec(tmp_path, num_kv_heads=6, max_positions=2048)


@pytest.mark.parametrize(("vocab_size", "padded"), [(1, 64), (64, 64), (65, 128), (70, 128), (32000, 32000)])
def test_the_vocabulary_is_padded_to_a_multiple_of_64(vocab_size: int, padded: int) -> None:
    assert expected_spec(Path("x"), vocab_size=vocab_size).padded_vocab_size == padded


# --------------------------------------------------------------------------------------------------- refused


def refusal(path: Path) -> str:
    """The message of read_spec, which names the file."""
    with pytest.raises(CheckpointError) as caught:
        read_spec(path)
    message = str(caught.value)
    assert message.startswith(f"{path / 'config.json'}: ")
    return message.removeprefix(f"{path / 'config.json'}: ")


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") == "no such file; a model is a HuggingFace directory"
    for place in ("checkpoints/step_000002/actor", "checkpoints/step_000010/actor", "hf"):  # of a run
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
        assert refusal(tmp_path).endswith(f"and this is a run's: {tmp_path / place} is one")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"model: x"])
def test_no_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert refusal(tmp_path).startswith("is not JSON: ")


def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert refusal(tmp_path).startswith("is not JSON: ")


def test_json_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    assert refusal(tmp_path) == "is not JSON: it holds list, not an object"


OTHERWISE = "it computes otherwise than those of like names, and does not become one by the name; "


@pytest.mark.parametrize(
    ("architectures", "named", "hint"),
    [
        (["MistralForCasualLM"], "MistralForCasualLM", "misspelt? the nearest known one is MistralForCausalLM; "),
        (["LLaMAForCausalLM"], "LLaMAForCausalLM", "misspelt? the nearest known one is LlamaForCausalLM; "),
        *[([name], name, OTHERWISE) for name in ("MistralLarge3ForCausalLM", "Qwen3NextForCausalLM")],
        *[([name], name, OTHERWISE) for name in ("Qwen2MoeForCausalLM", "Glm4vMoeForCausalLM", "OLlamaForCausalLM")],
        (["GPT2LMHeadModel"], "GPT2LMHeadModel", ""),
        (None, "none", ""),
        ([], "none", ""),
        ("LlamaForCausalLM", "none", ""),
    ],
)
def test_an_unknown_architecture_lists_the_known(architectures: Any, named: str, hint: str, tmp_path: Path) -> None:
    message = refusal(written(tmp_path, architectures=architectures))
    assert message == f"architectures = '{named}' is not supported; {hint}known are {', '.join(ARCHITECTURES)}"
    assert list(ARCHITECTURES)[:3] == ["LlamaForCausalLM", "LlamaForSequenceClassification", "MistralForCausalLM"]


REQUIRED = [
    *["hidden_size", "num_hidden_layers", "num_attention_heads"],
    *["intermediate_size", "vocab_size", "rms_norm_eps"],
]


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    assert refusal(written(tmp_path, without=(field,))) == f"{field} is missing or no number: None"


def test_a_field_that_is_no_number(tmp_path: Path) -> None:
    assert refusal(written(tmp_path, hidden_size="48")) == "hidden_size is missing or no number: '48'"


KNOWN_ROPES = "known are default, linear, llama3, yarn"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
            f"rope_type = 'longrope' is not supported: {KNOWN_ROPES}",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            f"rope_type = 'dynamic' is not supported: {KNOWN_ROPES}",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 4.0}},
            f"rope_type = 'su' is not supported: {KNOWN_ROPES}",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported: must be silu"),
        ({"attention_bias": True}, "attention_bias = True is not supported: biases of Llama are not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported: biases of Llama are not supported"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config = '...' is not supported: quantised weights",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "factor of rope_type linear = None is not supported: must be positive",
        ),
        ({"rope_parameters": [1]}, "rope_parameters = [1] is not supported: must be an object"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0 is not supported: must be positive"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5 is not supported: must be 1 in the family llama",
        ),
        (
            {"num_key_value_heads": 4},
            "num_key_value_heads = 4 is not supported: must divide num_attention_heads = 6",
        ),
        (
            {"num_hidden_layers": 1000000},
            "num_hidden_layers = 1000000 is not supported: must be a whole number from 1 to 10000",
        ),
        (
            {"hidden_size": -48},
            "hidden_size = -48 is not supported: must be a whole number from 1 to 2147483648",
        ),
        (
            {"vocab_size": 7.5},
            "vocab_size = 7.5 is not supported: must be a whole number from 1 to 2147483648",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": "x"},
            "sliding_window = 'x' is not supported: must be a whole number from 1 to 2147483648",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True},
            "attention_bias = True is not supported: biases of attention are not supported in this family",
        ),
        (
            {"architectures": ["GlmForCausalLM"], "attention_bias": False},
            "attention_bias = False is not supported: GLM-4 has biases of queries, keys and values",
        ),
        (
            {"architectures": ["OPTForCausalLM"], "ffn_dim": 40, "do_layer_norm_before": "no"},
            "do_layer_norm_before = 'no' is not supported: must be true or false",
        ),
        (
            {"architectures": ["OPTForCausalLM"], "ffn_dim": 40, "word_embed_proj_dim": 0},
            "word_embed_proj_dim = 0 is not supported: must be a whole number from 1 to 2147483648",
        ),
        ({"architectures": ["OPTForCausalLM"]}, "ffn_dim is missing or no number: None"),
        (
            {"architectures": ["OPTForCausalLM"], "ffn_dim": 40, "max_position_embeddings": None},
            "max_position_embeddings is missing or no number: None",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2},
            "num_local_experts is missing or no number: None",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9, "num_local_experts": 8},
            "num_experts_per_tok = 9 is not supported: there are 8 experts",
        ),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts_per_tok": 2,
                "num_experts": 8,
                "moe_intermediate_size": 8,
                "mlp_only_layers": [1],
            },
            "mlp_only_layers = [1] is not supported: dense layers among layers of experts are not supported",
        ),
    ],
)
def test_an_unsupported_model(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert refusal(written(tmp_path, **changes)) == message


# --------------------------------------------------------------------------------------- what a run asks of it


@pytest.mark.parametrize("tp", [1, 2])
def test_check_parallel_passes_where_everything_divides(tp: int) -> None:
    check_parallel(expected_spec(Path("x")), "actor.tensor_parallel_size", tp)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_ranks_may_share_a_key_value_head(num_kv_heads: int) -> None:
    spec = expected_spec(Path("x"), num_heads=8, num_kv_heads=num_kv_heads)
    for tp in (1, 2, 4, 8):
        check_parallel(spec, "actor.tensor_parallel_size", tp)


@pytest.mark.parametrize(
    ("fields", "tp", "message"),
    [
        (
            {},
            4,
            "actor.tensor_parallel_size = 4 does not divide num_attention_heads = 6 of a/b: "
            "6 = 1 x 4 + 2. Set actor.tensor_parallel_size=1 or 2",
        ),
        (
            {"ffn_hidden_size": 96, "vocab_size": 192},
            3,
            "actor.tensor_parallel_size = 3 must divide num_key_value_heads = 2 of a/b or be a multiple of that "
            "number: 3 = 1 x 2 + 1. Set actor.tensor_parallel_size=1 or 2",
        ),
        (  # 3 ranks share each group
            {"num_heads": 12, "num_kv_heads": 2, "ffn_hidden_size": 96, "vocab_size": 192},
            6,
            "actor.tensor_parallel_size = 6 does not divide the 128 rows of queries, keys and values of a/b: "
            "128 = 21 x 6 + 2. Set actor.tensor_parallel_size=1, 2 or 4",
        ),
        (
            {"num_heads": 12, "num_kv_heads": 6},
            4,
            "actor.tensor_parallel_size = 4 must divide num_key_value_heads = 6 of a/b or be a multiple of that "
            "number: 6 = 1 x 4 + 2. Set actor.tensor_parallel_size=1 or 2",
        ),
        (
            {"num_heads": 9, "num_kv_heads": 9},
            3,
            "actor.tensor_parallel_size = 3 does not divide intermediate_size = 40 of a/b: 40 = 13 x 3 + 1. Set "
            "actor.tensor_parallel_size=1",
        ),
        (
            {"num_heads": 9, "num_kv_heads": 9, "ffn_hidden_size": 42},
            3,
            "actor.tensor_parallel_size = 3 does not divide padded vocab_size = 128 of a/b: 128 = 42 x 3 + 2. Set "
            "actor.tensor_parallel_size=1",
        ),
        (
            {"num_experts": 4, "family": "qwen3_moe"},
            2,
            "actor.tensor_parallel_size = 2 leaves each expert 20 of moe_intermediate_size of a/b, no multiple of 8, "
            "as torch's grouped product needs it. Set actor.tensor_parallel_size=1",
        ),
    ],
)
def test_check_parallel_shows_the_arithmetic(fields: dict[str, int], tp: int, message: str) -> None:
    spec = dataclasses.replace(expected_spec(Path("a/b")), **fields)
    with pytest.raises(ConfigError) as caught:
        check_parallel(spec, "actor.tensor_parallel_size", tp)
        check_expert_shares(spec, "actor.tensor_parallel_size", tp)
    assert str(caught.value) == message


def test_experts_that_ranks_cannot_share_out_show_the_arithmetic() -> None:
    spec = dataclasses.replace(expected_spec(Path("a/b")), num_experts=6, family="qwen3_moe")
    check_experts(spec, "actor.expert_parallel_size", 3)
    with pytest.raises(ConfigError, match=r"expert_parallel_size = 4 does not divide the number of experts = 6 of a/b"):
        check_experts(spec, "actor.expert_parallel_size", 4)
    dense = expected_spec(Path("a/b"))
    check_experts(dense, "actor.expert_parallel_size", 1)
    with pytest.raises(ConfigError, match=r"actor\.expert_parallel_size = 2: a/b has no experts"):
        check_experts(dense, "actor.expert_parallel_size", 2)


def test_check_length() -> None:
    spec = expected_spec(Path("a/b"))
    spec.check_length(100)
    with pytest.raises(ConfigError) as caught:
        spec.check_length(101)
    assert str(caught.value) == (
        like(
            "data.max_prompt_length + sampling.max_response_length = 101 exceeds max_position_embeddings = 100 of a/b. "
            "Set actor.hf_overrides.max_position_embeddings=101, with rope_parameters there as the model's card says"
        )
    )
    learned = expected_spec(Path("a/b"), family="opt")
    with pytest.raises(ConfigError, match=r"exceeds max_position_embeddings = 100 of a/b\. Set data\.max_length=100$"):
        learned.check_length(101, shortened=lambda most: {"data.max_length": [most]})


@pytest.mark.parametrize(
    ("kind", "named"), [({"model_type": "qwen2"}, "'qwen2'"), ({"model_type": None}, "None"), ({"model_type": 3}, "3")]
)
def test_the_model_type_must_be_that_of_the_architecture(kind: dict[str, Any], named: str, tmp_path: Path) -> None:
    """transformers and vLLM choose their classes by it; without it they know of no model."""
    message = refusal(written(tmp_path, **kind))
    rule = "must be 'llama' for this architecture; each word names other mathematics: correct the wrong one"
    assert message == like(f"model_type = {named} is not supported: {rule}")


def test_two_ropes_that_differ(tmp_path: Path) -> None:
    """transformers takes the second, which users add to files that have the first."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    message = refusal(written(tmp_path, rope_scaling=yarn))
    assert message.endswith("is not supported: rope_parameters differs")


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    hf_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"vocab_size": 7,', 1))
    assert refusal(tmp_path) == "is not JSON: the key 'vocab_size' stands twice"


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    written(tmp_path, auto_map={"AutoConfig": "code.Config"})
    (tmp_path / "code.py").write_text("raise SystemExit('code of a checkpoint has been run')")
    assert read_spec(tmp_path).rotary().frequencies.shape == (4,)


def test_a_sliding_window_counts_where_sequences_are_longer() -> None:
    spec = expected_spec(Path("a/b"), sliding_window=60)
    spec.check_length(60)
    with pytest.raises(ConfigError) as caught:
        spec.check_length(61)
    assert str(caught.value) == (
        like(
            "data.max_prompt_length + sampling.max_response_length = 61 exceeds sliding_window = 60 of a/b: "
            "hybridflow trains attention over the whole sequence, which is the same only up to the window's length"
        )
    )
