"""HuggingFace -> megatron -> HuggingFace: every bit comes back, and transformers loads the result."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.convert.verify import verify
from tests.tiny_models import FAMILIES
from tests.tools.convert.tiny import (
    CHAT_TEMPLATE,
    INDEX,
    SENTENCEPIECE,
    Models,
    assert_same_bytes,
    cast,
    change_config,
    left_in,
    rewrite,
    tensors_of,
)

pytestmark = pytest.mark.slow  # many models

LAYOUTS = {  # dtype, files of the source, bytes of a file of the result
    "bfloat16": (torch.bfloat16, 3, 40_000),
    "float16": (torch.float16, 1, 5 * 10**9),
    "float32": (torch.float32, 2, 10_000),  # some tensors are larger than a file
}


def by_turns(cases: Sequence[tuple[bool, str]]) -> list[Any]:
    """Each family with two of the cases, which take turns; the product is weekly."""
    return [
        pytest.param(family, *case, marks=() if (number - turn) % len(cases) in (0, 3) else pytest.mark.weekly)
        for turn, family in enumerate(FAMILIES)
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("family", "tied", "layout"), by_turns(list(product((False, True), LAYOUTS))))
def test_every_bit_comes_back(family: str, tied: bool, layout: str, models: Models, tmp_path: Path) -> None:
    dtype, num_files, max_shard_bytes = LAYOUTS[layout]
    source = models.copy(tmp_path / "source", family, tied=tied)
    cast(source, dtype, num_files=num_files)
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=max_shard_bytes)
    assert_same_bytes(source, tmp_path / "back")
    assert verify(source, tmp_path / "megatron") == verify(tmp_path / "megatron", tmp_path / "back") == []
    assert (tmp_path / "back" / INDEX).exists() == (num_files > 1)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == layout


@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_head_comes_back(family: str, models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", family, kind="reward")
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert_same_bytes(source, tmp_path / "back")
    assert "score.weight" in tensors_of(tmp_path / "back")


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_result(family: str, tied: bool, models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", family, tied=tied)
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=40_000)
    prompt = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(path)(prompt).logits for path in (source, tmp_path / "back")
        )
    # where in memory the inputs of a narrow product lie decides how the product is rounded
    torch.testing.assert_close(before, after, rtol=0, atol=1e-4 if family.startswith("qwen3_5") else 0)


def test_transformers_loads_a_score_head(models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", "qwen2", kind="reward")
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    prompt = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        before, after = (
            AutoModelForSequenceClassification.from_pretrained(path)(prompt).logits
            for path in (source, tmp_path / "back")
        )
    assert torch.equal(before, after)


def test_what_lies_beside_the_weights_goes_along(source: Path, tmp_path: Path) -> None:
    (source / "pytorch_model.bin.index.json").write_text("{}")  # of weights that nobody converts
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    companions = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"]
    companions.append("tokenizer_config.json")
    assert left_in(tmp_path / "back") == sorted([*companions, "model.safetensors"])
    assert set(companions) < set(left_in(tmp_path / "megatron"))
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == SENTENCEPIECE
    for name in set(companions) - {"config.json"}:
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("1+2=").input_ids == AutoTokenizer.from_pretrained(source)("1+2=").input_ids


def test_config_keeps_what_it_says(source: Path, tmp_path: Path) -> None:
    change_config(source, torch_dtype="float32", dtype=None, something_of_the_users=[1, {"a": 2}])
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "back"))
    del before["torch_dtype"]
    assert after == before | {"dtype": "float32"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_casts_every_tensor(dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back", dtype=dtype)
    for name, x in tensors_of(tmp_path / "back").items():
        assert torch.equal(x, tensors_of(source)[name].to(dtype)), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.dtype == dtype


@pytest.mark.parametrize("mixed", [False, True], ids=["of float32", "float32 beside bfloat16"])
@pytest.mark.parametrize(
    ("family", "kept", "beside"),
    [
        ("deepseek_v3", ("mlp.gate.e_score_correction_bias",), ()),
        ("glm4_moe", ("mlp.gate.e_score_correction_bias", "mlp.gate.weight"), ()),
        ("qwen3_5", ("A_log",), ("linear_attn.dt_bias", "linear_attn.norm.weight")),
    ],
)
def test_what_chooses_and_decays_stays_in_float32(
    family: str, kept: tuple[str, ...], beside: tuple[str, ...], mixed: bool, models: Models, tmp_path: Path
) -> None:
    """beside: in float32 where the source has it so beside weights in bfloat16."""
    source = models.copy(tmp_path / "source", family)
    wide = kept + beside if mixed else kept
    if mixed:
        rewrite(source, {name: x if name.endswith(wide) else x.bfloat16() for name, x in tensors_of(source).items()})
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back", dtype=torch.bfloat16)
    found = tensors_of(tmp_path / "back")
    assert {name for name, x in found.items() if x.dtype == torch.float32} == {n for n in found if n.endswith(wide)}
    for name, x in tensors_of(source).items():
        assert torch.equal(found[name], x if name.endswith(wide) else x.bfloat16()), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_mixed_dtypes_are_kept(models: Models, tmp_path: Path) -> None:
    """As in checkpoints of experts whose router stays in float32."""
    source = models.copy(tmp_path / "source", "mixtral")
    tensors = {name: x if name.endswith("gate.weight") else x.bfloat16() for name, x in tensors_of(source).items()}
    rewrite(source, tensors)
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert_same_bytes(source, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
