"""Rotary embedding: frequencies and factors equal to those of transformers' own models, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hybridflow.architecture.spec import config_changes, read_spec
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.formats.huggingface_files import write_config
from hybridflow.rollout.language_model import LanguageModel
from tests.architecture.test_spec import hf_config, hf_model, refusal, written
from tests.messages import like
from tests.tiny_models import make_checkpoints, make_wrapper

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=50,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=25)
ROPES = {
    "default": dict(rope_type="default", rope_theta=12345.0),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, other bounds": YARN | dict(beta_fast=8.0, beta_slow=0.5, truncate=False),
    "yarn with a factor": YARN | dict(attention_factor=0.9),
    "yarn with scales": YARN | dict(mscale=0.707, mscale_all_dim=0.5, attention_factor=None),
    "yarn, one scale": YARN | dict(mscale=0.707),
}
OWN = {  # what families need beside the common sizes
    "GlmForCausalLM": {"head_dim": 8, "pad_token_id": 3},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "Qwen3MoeForCausalLM": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
    },
}
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", *OWN)


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_frequencies_and_factor_equal_those_of_the_rotary_embedding(
    architecture: str, rope: str, head_dim: int, tmp_path: Path
) -> None:
    own = OWN.get(architecture, {})
    own = own | {"head_dim": head_dim} if "head_dim" in own else own
    config = hf_config(architecture, hidden_size=6 * head_dim, rope_parameters=dict(ROPES[rope]), **own)
    config.save_pretrained(tmp_path)
    expected = hf_model(config).model.rotary_emb
    actual = read_spec(tmp_path).rotary()
    assert actual.frequencies.dtype == torch.float32
    assert torch.equal(actual.frequencies, expected.inv_freq)
    assert actual.factor == expected.attention_scaling


def test_the_rope_types_differ(tmp_path: Path) -> None:
    found = {}
    for name, rope in ROPES.items():
        hf_config(rope_parameters={**rope, "rope_theta": 10000.0}).save_pretrained(tmp_path / name)
        found[name] = read_spec(tmp_path / name).rotary()
    default = found["default"].frequencies
    torch.testing.assert_close(default, 10000.0 ** -torch.tensor([0, 0.25, 0.5, 0.75]))
    torch.testing.assert_close(found["linear"].frequencies, default / 4)
    assert not torch.equal(found["llama3"].frequencies, default)
    # dimension i of 8 turns 25 / (2 pi) x 10000^(-i / 4) times in 25 positions: 4, 0.4, 0.04 and 0.004 times. Between
    # 32 turns, which none has, and 1, at 0.6, floor and ceil leave a ramp from 0 to 1: all but the first are divided.
    torch.testing.assert_close(found["yarn"].frequencies, default / torch.tensor([1, 4, 4, 4]))
    factors = [found[name].factor for name in ROPES]
    # 0.1 ln 4 + 1; (0.0707 ln 4 + 1) / (0.05 ln 4 + 1)
    assert factors == pytest.approx([1, 1, 1, 1.1386294, 1.1386294, 0.9, 1.0268362, 1.1386294])


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_as_older_files_say_it(key: str, tmp_path: Path) -> None:
    old = {"rope_theta": 10000.0, "rope_scaling": {key: "linear", "factor": 4.0}}
    spec = read_spec(written(tmp_path, without=("rope_parameters",), **old))
    expected = 10000.0 ** -torch.tensor([0, 0.25, 0.5, 0.75]) / 4
    torch.testing.assert_close(spec.rotary().frequencies, expected)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("beside", [{}, {"attn_factor": 0.8782488562869419}], ids=["plain", "attn_factor"])
def test_yarn_as_older_files_say_it(key: str, beside: dict[str, float], tmp_path: Path) -> None:
    """DeepSeek-R1-0528-Qwen3-8B has attn_factor, which transformers and vLLM pass over."""
    scaling = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 25} | beside
    spec = read_spec(written(tmp_path, without=("rope_parameters",), rope_theta=10000.0, rope_scaling=scaling))
    expected = 10000.0 ** -torch.tensor([0, 0.25, 0.5, 0.75]) / torch.tensor([1, 4, 4, 4])
    torch.testing.assert_close(spec.rotary().frequencies, expected)
    assert spec.rotary().factor == pytest.approx(1.1386294)


def test_original_positions_beside_the_scaling_go_first(tmp_path: Path) -> None:
    config = hf_config(rope_parameters=dict(YARN), original_max_position_embeddings=50)
    config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert torch.equal(spec.rotary().frequencies, hf_model(config).model.rotary_emb.inv_freq)
    assert dict(spec.rope)["original_max_position_embeddings"] == 50


def test_heads_whose_size_is_null(tmp_path: Path) -> None:
    """Mixtral's config.json has such, which transformers' own formula of YaRN cannot take."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 3}
    for name, own in (("null", {}), ("given", {"head_dim": 8})):
        hf_config("MixtralForCausalLM", rope_parameters=dict(YARN), **experts, **own).save_pretrained(tmp_path / name)
    null, given = (read_spec(tmp_path / name).rotary() for name in ("null", "given"))
    assert torch.equal(null.frequencies, given.frequencies) and null.factor == given.factor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": None}, "factor of rope_type yarn = None is not supported: must be positive"),
        ({"beta_fast": 0}, "beta_fast of rope_type yarn = 0 is not supported: must be positive"),
        ({"beta_slow": None}, "beta_slow of rope_type yarn = None is not supported: must be positive"),
        ({"attention_factor": "x"}, "attention_factor of rope_type yarn = 'x' is not supported: must be positive"),
        ({"mscale": -1}, "mscale of rope_type yarn = -1 is not supported: must be positive, or null"),
        ({"truncate": None}, "truncate of rope_type yarn = None is not supported: must be true or false"),
    ],
)
def test_what_yarn_cannot_have(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert refusal(written(tmp_path, rope_parameters=YARN | changes)).startswith(message)


def test_rope_is_kept_for_comparisons(tmp_path: Path) -> None:
    for rope in (LLAMA3, YARN, ROPES["yarn with a factor"]):
        hf_config(rope_parameters=dict(rope)).save_pretrained(tmp_path)
        assert dict(read_spec(tmp_path).rope) == rope


def test_yarn_reaches_as_far_as_the_engine_has_angles(tmp_path: Path) -> None:
    spec = read_spec(written(tmp_path, rope_parameters=YARN | {"factor": 2.0}))
    spec.check_length(50)
    with pytest.raises(ConfigError) as caught:
        spec.check_length(51, "data.max_length", "critic")
    assert str(caught.value) == like(
        f"data.max_length = 51 exceeds factor x original_max_position_embeddings = 50 of rope_type yarn of {tmp_path}: "
        "vLLM turns no position beyond. Shorten the rows, or give critic.hf_overrides.rope_parameters a factor of 3"
    )


# ------------------------------------------------------------------------------------------------ hf_overrides

OVERRIDING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("file", ["older", "newer", "scaled", "outside"])
def test_overrides_take_the_place_of_the_files_rope(file: str, name: str, tmp_path: Path) -> None:
    """Qwen3's file has rope_theta beside a rope_scaling of null; the model's card adds the scaling there."""
    theta = {"rope_theta": 5000.0}
    files = {
        "older": theta | {"rope_scaling": None},
        "newer": {"rope_parameters": theta | {"rope_type": "default"}},
        "scaled": {"rope_parameters": theta | LLAMA3 | theta},
        "outside": {"rope_parameters": YARN | theta, "original_max_position_embeddings": 25},
    }
    without = ("rope_parameters",) if file == "older" else ()
    changed = read_spec(written(tmp_path / "file", **files[file], without=without), overrides={name: OVERRIDING})
    by_hand = theta | {"rope_scaling": OVERRIDING}
    expected = read_spec(written(tmp_path / "by_hand", **by_hand, without=("rope_parameters",)))
    assert changed.rope == expected.rope
    assert torch.equal(changed.rotary().frequencies, expected.rotary().frequencies)
    assert changed.rotary().factor == expected.rotary().factor
    write_config(changed.path, tmp_path, config_changes(changed, "lm"))
    again = read_spec(tmp_path)
    assert again.rope == expected.rope and again.rotary().factor == expected.rotary().factor
    assert torch.equal(again.rotary().frequencies, expected.rotary().frequencies)
    assert read_spec(tmp_path, overrides={name: OVERRIDING}).rope == expected.rope, "overrides of the same say the same"


def test_another_theta_takes_the_place_of_both_that_a_file_has(tmp_path: Path) -> None:
    source = written(tmp_path / "file", rope_theta=10.0, rope_parameters={"rope_theta": 10.0, "rope_type": "default"})
    spec = read_spec(source, overrides={"rope_parameters": {"rope_theta": 7.0}})
    assert spec.rotary().frequencies.tolist() == pytest.approx([7.0 ** (-i / 4) for i in range(4)])
    write_config(source, tmp_path, config_changes(spec, "lm"))
    tree = json.loads((tmp_path / "config.json").read_text())
    assert (tree["rope_theta"], tree["rope_parameters"]["rope_theta"]) == (7.0, 7.0)


def test_how_many_dimensions_turn_stays_the_files(tmp_path: Path) -> None:
    config = hf_config("GlmForCausalLM", head_dim=8, pad_token_id=3)
    config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path, overrides={"max_position_embeddings": 400, "rope_scaling": OVERRIDING})
    assert spec.rotary_dim == 4 and len(spec.rotary().frequencies) == 2 and spec.max_positions == 400


def test_overrides_of_a_wrappers_language_model(tmp_path: Path) -> None:
    """In text_config of the file, in what vLLM reads, and in the exported file of the language model."""
    make_wrapper(tmp_path / "file")
    spec = read_spec(tmp_path / "file", overrides={"max_position_embeddings": 400, "rope_scaling": OVERRIDING})
    write_config(spec.path, tmp_path, config_changes(spec, "lm"), section=spec.config_section)
    exported = read_spec(tmp_path)
    assert exported.rope == spec.rope and exported.max_positions == 400 and exported.rotary_dim == 4
    assert torch.equal(exported.rotary().frequencies, spec.rotary().frequencies)
    told = LanguageModel.of(spec).arguments("cpu", prefix_caching=False)["hf_overrides"]
    read = told(AutoConfig.from_pretrained(tmp_path / "file"))
    assert read.max_position_embeddings == 400
    assert read.rope_parameters == AutoConfig.from_pretrained(tmp_path).rope_parameters


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (OVERRIDING | {"rope_type": "dynamic"}, "rope_type = 'dynamic' is not supported: known are default, linear, "),
        (
            OVERRIDING | {"factr": 2.0},
            "factr = 2.0 is not supported: fields of rope_type yarn are rope_type, rope_theta",
        ),
        ({"factor": 2.0}, "factor = 2.0 is not supported: fields of rope_type default are rope_type, rope_theta"),
        (OVERRIDING | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported: fields of"),
        (OVERRIDING | {"factor": -1}, "factor of rope_type yarn = -1 is not supported: must be positive"),
        (
            {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings of rope_type yarn = None is not supported: must be the positions that",
        ),
    ],
)
def test_overrides_that_are_refused(rope: dict[str, Any], message: str, tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_spec(tmp_path, overrides={"rope_parameters": rope})
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {message}")


def test_learned_positions_have_no_overrides(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, family="opt", tied=True)
    with pytest.raises(CheckpointError, match=r"hf_overrides = .* the model learned a vector for each position"):
        read_spec(tmp_path / "policy", overrides={"max_position_embeddings": 400})
