"""Every tensor of the source is read once, every parameter of the target written once, or nothing is written."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from hybridflow.architecture.parts import Block, blocks
from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weight_files import write_distributed
from hybridflow.convert import to_megatron as chunks_module
from hybridflow.convert.survey import open_survey
from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import make_plan, to_megatron
from hybridflow.convert.verify import verify
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_storage import Chunk
from tests.messages import like
from tests.tiny_models import give_own_head
from tests.tools.convert.tiny import Models, assert_same_bytes, change_config, left_in, rewrite, tensors_of

FIRST_LAYER = "model.layers.0.self_attn"


def refused(source: Path, **options: object) -> list[str]:
    """The lines of the error; nothing has been written."""
    target = source.with_name("target")
    with pytest.raises(CheckpointError) as caught:
        to_megatron(source, target, **options)
    assert left_in(source.parent) == [source.name]
    return str(caught.value).splitlines()


def test_extra_and_missing_tensors_are_listed_together(source: Path) -> None:
    tensors = tensors_of(source)
    del tensors["model.norm.weight"], tensors[f"{FIRST_LAYER}.k_proj.weight"]
    rewrite(source, tensors | {"model.layers.0.adapter.weight": torch.zeros(2), "extra": torch.zeros(3)})
    file = source / "model.safetensors"
    assert sorted(refused(source)) == sorted(
        [
            f"{source}: no tensor {FIRST_LAYER}.k_proj.weight, which config.json asks for with shape (32, 64)",
            f"{source}: no tensor model.norm.weight, which config.json asks for with shape (64,)",
            f"{file}: extra is no weight of the model that config.json describes",
            f"{file}: model.layers.0.adapter.weight is no weight of the model that config.json describes",
        ]
    )


def test_a_long_list_is_cut(source: Path) -> None:
    rewrite(source, tensors_of(source) | {f"extra.{i}": torch.zeros(1) for i in range(50)})
    lines = refused(source)
    assert len(lines) == 21
    assert lines[-1] == "... and 30 more like these"


def test_an_expert_that_is_missing(models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", "qwen3_moe")
    tensors = tensors_of(source)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    rewrite(source, tensors)
    assert refused(source) == [
        like(
            f"{source}: no tensor model.layers.1.mlp.experts.2.up_proj.weight, which config.json asks for with shape "
            "(32, 64)"
        )
    ]


def test_more_layers_than_the_config_says(source: Path) -> None:
    change_config(source, num_hidden_layers=1)
    lines = refused(source)
    assert len(lines) == 9
    assert all("model.layers.1." in line and "is no weight" in line for line in lines)


def test_a_config_that_asks_for_countless_layers(source: Path) -> None:
    change_config(source, num_hidden_layers=5000)
    assert refused(source) == [
        like(f"{source / 'config.json'}: num_hidden_layers = 5000, but the files of {source} hold only 21 tensors")
    ]


def test_derived_buffers_are_named_and_dropped(source: Path, tmp_path: Path) -> None:
    plain = tensors_of(source)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    rewrite(source, plain | buffers | {"model.layers.0.attn.masked_bias": torch.tensor(-1e4)})
    console = Console(record=True, width=200)
    to_megatron(source, tmp_path / "megatron", console=console)
    text = console.export_text()
    assert "dropped: model.layers.*.self_attn.rotary_emb.inv_freq (2 tensors): follows from config.json" in text
    assert "dropped: model.layers.*.attn.masked_bias: follows from config.json" in text
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert tensors_of(tmp_path / "back").keys() == plain.keys()
    assert verify(source, tmp_path / "back") == []


# -------------------------------------------------------------------------------------------- tied output layers


def test_a_tied_copy_of_the_embedding_is_named_and_dropped(models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", tied=True)
    plain = tensors_of(source)
    rewrite(source, plain | {"lm_head.weight": plain["model.embed_tokens.weight"].clone()})
    console = Console(record=True, width=200)
    to_megatron(source, tmp_path / "megatron", console=console)
    expected = "dropped: lm_head.weight: a copy of model.embed_tokens.weight, to which config.json ties it"
    assert expected in console.export_text()
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert tensors_of(tmp_path / "back").keys() == plain.keys()


def test_a_tied_copy_that_differs_in_a_bit(models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", tied=True)
    plain = tensors_of(source)
    other = plain["model.embed_tokens.weight"].clone()
    other[7, 3], plain["model.embed_tokens.weight"][7, 3] = 0.0, -0.0
    rewrite(source, plain | {"lm_head.weight": other})
    assert refused(source) == [
        like(
            f"{source / 'model.safetensors'}: config.json ties lm_head.weight to model.embed_tokens.weight "
            "(tie_word_embeddings), but 1 of 6,400 elements differ, the first at [7, 3]: -0.0 (bits 0x80000000) "
            "and 0.0 "
            "(bits 0x00000000)"
        )
    ]


def test_a_tied_copy_of_another_dtype(models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", tied=True)
    plain = tensors_of(source)
    plain["model.embed_tokens.weight"] = plain["model.embed_tokens.weight"].bfloat16().float()
    rewrite(source, plain | {"lm_head.weight": plain["model.embed_tokens.weight"].bfloat16()})
    assert "bfloat16" in refused(source)[0]


def test_a_head_that_is_no_copy_is_kept_and_said(models: Models, tmp_path: Path) -> None:
    """There and back, and read as the model that transformers reads."""
    source = models.copy(tmp_path / "source", tied=True)
    head = give_own_head(source)
    to_megatron(source, tmp_path / "megatron")
    change_config(tmp_path / "megatron", tie_word_embeddings=True)  # and then says so again
    assert not read_spec(tmp_path / "megatron").tied
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert_same_bytes(source, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False
    assert verify(source, tmp_path / "back") == []
    assert torch.equal(AutoModelForCausalLM.from_pretrained(source).lm_head.weight, head)


# -------------------------------------------------------------------------------- what a wrong table would do


def test_a_table_that_skips_rows(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def skipping(weight: Weight, spec: object) -> tuple[Block, ...]:
        found = blocks(weight, spec)
        return found[:-1] if weight.layer == 1 and len(found) > 2 else found

    monkeypatch.setattr(chunks_module, "blocks", skipping)
    assert refused(source) == [
        like("model.layers.1.self_attn.v_proj.weight: by the table of weights its rows 24 .. 31 are not used once")
    ]


def test_a_table_that_writes_rows_twice(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(weight: Weight, spec: object) -> tuple[Block, ...]:
        found = blocks(weight, spec)
        return tuple(block._replace(row=0) for block in found) if len(found) == 2 else found

    monkeypatch.setattr(chunks_module, "blocks", shifted)
    assert refused(source) == [
        like(
            "decoder.layers.mlp.linear_fc1.weight: by the table of weights its elements 0 .. 6143 are used more "
            "than once"
        )
    ]


def test_layers_of_different_dtypes(source: Path) -> None:
    tensors = tensors_of(source)
    tensors[f"{FIRST_LAYER}.v_proj.weight"] = tensors[f"{FIRST_LAYER}.v_proj.weight"].half()
    rewrite(source, tensors)
    assert refused(source) == [
        like(
            f"{source / 'model.safetensors'}: {FIRST_LAYER}.v_proj.weight is torch.float16, but "
            f"{FIRST_LAYER}.q_proj.weight is torch.float32: they are stored as one tensor, "
            "decoder.layers.self_attention.linear_qkv.weight"
        )
    ]


# ------------------------------------------------------------------------------------------ megatron's directories


def write_with(source: Path, target: Path, more: list[Chunk], leave_out: str = "") -> Path:
    """A torch_dist checkpoint with chunks beside the weights, and without one of its keys."""
    plan = make_plan(open_survey(source), value_head=False, lm_head=None)
    write_distributed(target, [chunk for chunk in plan.chunks if chunk.key != leave_out] + more)
    for file in source.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


def chunk(key: str, *shape: int) -> Chunk:
    return Chunk(key, (0,) * len(shape), shape, shape, torch.float32, lambda: torch.ones(shape))


def test_optimizer_state_beside_the_weights_is_ignored(source: Path, tmp_path: Path) -> None:
    beside = [
        chunk("optimizer.state.exp_avg.decoder.final_layernorm.weight", 64),
        chunk("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.param", 512),
        chunk("rng_state", 3),
    ]
    write_with(source, tmp_path / "megatron", beside)
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert_same_bytes(source, tmp_path / "back")


def test_an_unknown_key_of_megatron(source: Path, tmp_path: Path) -> None:
    write_with(source, tmp_path / "megatron", [chunk("decoder.layers.mlp.linear_fc9.weight", 2, 64, 64)])
    with pytest.raises(CheckpointError) as caught:
        to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert str(caught.value) == like(
        f"{tmp_path / 'megatron'}: decoder.layers.mlp.linear_fc9.weight is no weight of the model"
    )
    assert left_in(tmp_path) == ["megatron", "source"]


def test_a_missing_key_of_megatron(source: Path, tmp_path: Path) -> None:
    write_with(source, tmp_path / "megatron", [], leave_out="decoder.layers.mlp.linear_fc2.weight")
    with pytest.raises(CheckpointError) as caught:
        to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert str(caught.value).splitlines() == [
        f"{tmp_path / 'megatron'}: no tensor model.layers.{i}.mlp.down_proj.weight, which config.json asks for with "
        "shape (64, 96)"
        for i in range(2)
    ]
