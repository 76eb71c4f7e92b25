"""The weight table: shards by hand, made whole again bitwise, each element held once, complete against transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from hybridflow.models.spec import ModelSpec
from hybridflow.models.weights import (
    EMBEDDING,
    FINAL_NORM,
    LAYER,
    LM_HEAD,
    QKV_BIAS,
    QKV_WEIGHT,
    VALUE_HEAD,
    Split,
    Weight,
    canonical_name,
    join_parts,
    local_slice,
    model_weights,
    shard_shape,
    staged_weights,
    whole_parts,
)


def tiny_spec(**changes: object) -> ModelSpec:
    """8 query heads in 4 groups, a vocabulary of 70 padded to 128: every size differs from every other."""
    fields = dict(
        path=Path("nowhere"),
        family="qwen2",
        head="lm",
        num_layers=2,
        hidden_size=24,
        ffn_hidden_size=20,
        num_heads=8,
        num_kv_heads=4,
        head_dim=3,
        vocab_size=70,
        norm_eps=1e-6,
        qkv_bias=True,
        tied=False,
        max_positions=64,
    )
    return ModelSpec(**{**fields, **changes})


GATE_UP, DOWN = LAYER[4], LAYER[5]
EVERY_WEIGHT = [EMBEDDING, *LAYER, QKV_BIAS, FINAL_NORM, LM_HEAD, VALUE_HEAD]
EACH_WEIGHT = pytest.mark.parametrize("weight", EVERY_WEIGHT, ids=lambda weight: weight.hf[0])
EACH_TP = pytest.mark.parametrize("tp", [1, 2, 4])


def numbered_parts(weight: Weight, spec: ModelSpec) -> list[Tensor]:
    """The HuggingFace parts, holding 1, 2, 3, ...: no two elements of any of them are equal."""
    shapes = weight.shapes(spec)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    numbers = torch.arange(1, sum(sizes) + 1).split(sizes)
    return [part.view(shape) for part, shape in zip(numbers, shapes, strict=True)]


def sliced(weight: Weight, parts: list[Tensor], spec: ModelSpec, tp_rank: int, tp: int) -> list[Tensor]:
    """What rank `tp_rank` reads of each part."""
    slices = [local_slice(weight, i, spec, tp_rank, tp) for i in range(len(parts))]
    return [part.narrow(dim, start, stop - start) for part, (dim, start, stop) in zip(parts, slices, strict=True)]


def shards(weight: Weight, parts: list[Tensor], spec: ModelSpec, tp: int) -> list[Tensor]:
    return [join_parts(weight, sliced(weight, parts, spec, rank, tp), spec, rank, tp) for rank in range(tp)]


# --------------------------------------------------------------------------------------------------- by hand


def test_qkv_rows_by_hand() -> None:
    # 4 query heads of one element in 2 groups; row i of q is (i, i), of k (10 + i, ...), of v (20 + i, ...)
    spec = tiny_spec(num_heads=4, num_kv_heads=2, head_dim=1, hidden_size=2)
    q, k, v = (torch.arange(n)[:, None].expand(n, 2) + first for n, first in [(4, 0), (2, 10), (2, 20)])
    whole = [[0, 0], [1, 1], [10, 10], [20, 20], [2, 2], [3, 3], [11, 11], [21, 21]]
    assert join_parts(QKV_WEIGHT, [q, k, v], spec, 0, 1).tolist() == whole
    assert [shard.tolist() for shard in shards(QKV_WEIGHT, [q, k, v], spec, 2)] == [whole[:4], whole[4:]]
    bias = [part[:, 0] for part in (q, k, v)]
    assert join_parts(QKV_BIAS, bias, spec, 0, 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_qkv_rows_of_ranks_that_share_a_group_by_hand() -> None:
    # 8 query heads of one element in 2 groups, 4 ranks: each group [q q q q k v] is cut in the middle
    spec = tiny_spec(num_heads=8, num_kv_heads=2, head_dim=1)
    parts = [torch.arange(8), torch.arange(10, 12), torch.arange(20, 22)]
    assert [local_slice(QKV_BIAS, 0, spec, rank, 4) for rank in range(4)] == [
        (0, 0, 4),
        (0, 0, 4),
        (0, 4, 8),
        (0, 4, 8),
    ]
    assert [local_slice(QKV_BIAS, 1, spec, rank, 4) for rank in range(4)] == [
        (0, 0, 1),
        (0, 0, 1),
        (0, 1, 2),
        (0, 1, 2),
    ]
    assert [shard.tolist() for shard in shards(QKV_BIAS, parts, spec, 4)] == [
        *[[0, 1, 2], [3, 10, 20]],
        *[[4, 5, 6], [7, 11, 21]],
    ]


def test_qkv_rows_of_wider_heads_by_hand() -> None:
    # 2 heads of 2 elements in 2 groups: q0 q0' k0 k0' v0 v0' q1 ...
    spec = tiny_spec(num_heads=2, num_kv_heads=2, head_dim=2)
    parts = [torch.arange(4), torch.arange(10, 14), torch.arange(20, 24)]
    assert join_parts(QKV_BIAS, parts, spec, 0, 1).tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]


def test_gated_rows_by_hand() -> None:
    # each rank holds its rows of gate above its rows of up
    spec = tiny_spec(ffn_hidden_size=4, hidden_size=1)
    gate, up = torch.arange(4)[:, None], torch.arange(10, 14)[:, None]
    assert [shard.flatten().tolist() for shard in shards(GATE_UP, [gate, up], spec, 2)] == [
        [0, 1, 10, 11],
        [2, 3, 12, 13],
    ]


def test_columns_by_hand() -> None:
    spec = tiny_spec(ffn_hidden_size=4, hidden_size=2)
    down = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert [shard.tolist() for shard in shards(DOWN, [down], spec, 2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@EACH_TP
@pytest.mark.parametrize("weight", [EMBEDDING, LM_HEAD], ids=["embedding", "lm_head"])
def test_rows_past_the_vocabulary_are_zero(weight: Weight, tp: int) -> None:
    # 70 rows padded to 128: with tp 4 of 32 rows each, rank 2 holds 6 true ones and rank 3 none
    spec = tiny_spec()
    parts = numbered_parts(weight, spec)
    found = shards(weight, parts, spec, tp)
    assert all(shard.shape == (128 // tp, 24) for shard in found)
    stacked = torch.cat(found)
    assert torch.equal(stacked[:70], parts[0])
    assert (stacked[70:] == 0).all()


# ------------------------------------------------------------------------------------- inverse and coverage


@EACH_TP
@EACH_WEIGHT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_whole_parts_undoes_join_bitwise(weight: Weight, tp: int, dtype: torch.dtype, num_kv_heads: int) -> None:
    spec = tiny_spec(num_kv_heads=num_kv_heads, head_dim=4)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator).to(dtype) for shape in weight.shapes(spec)]
    found = shards(weight, parts, spec, tp)
    assert all(shard.dtype == dtype and shard.shape == shard_shape(weight, spec, tp) for shard in found)
    back = whole_parts(weight, found, spec)
    assert len(back) == len(parts)
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))


@EACH_TP
@EACH_WEIGHT
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_shards_hold_every_element_once(weight: Weight, tp: int, num_kv_heads: int) -> None:
    spec = tiny_spec(num_kv_heads=num_kv_heads)
    parts = numbered_parts(weight, spec)
    found = shards(weight, parts, spec, tp)
    assert {tuple(shard.shape) for shard in found} == {shard_shape(weight, spec, tp)}
    everything = torch.cat([part.flatten() for part in parts])
    if weight.split is Split.REPLICATED:
        assert all(torch.equal(shard.flatten(), everything) for shard in found)
        return
    held = torch.cat([shard.flatten() for shard in found])
    assert torch.equal(held[held > 0].sort().values, everything)
    assert (held == 0).sum() == (58 * 24 if weight.split is Split.VOCAB else 0)


@EACH_TP
@EACH_WEIGHT
def test_neighbouring_slices_meet_and_the_last_ends_the_part(weight: Weight, tp: int) -> None:
    spec = tiny_spec()
    for part, shape in enumerate(weight.shapes(spec)):
        slices = [local_slice(weight, part, spec, rank, tp) for rank in range(tp)]
        dims, starts, stops = zip(*slices, strict=True)
        assert dims == (1 if weight.split is Split.COLUMNS else 0,) * tp
        if weight.split is Split.REPLICATED:
            assert set(slices) == {(0, 0, shape[0])}
        else:
            assert (starts[0], *starts[1:], stops[-1]) == (0, *stops[:-1], shape[dims[0]])


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_grouped_queries_stay_with_their_key(num_kv_heads: int) -> None:
    """Element h of q and element g of k stand in one group exactly where transformers' repeat_kv pairs them."""
    spec = tiny_spec(num_kv_heads=num_kv_heads, head_dim=1)
    q, k, v = torch.arange(8), torch.arange(100, 100 + num_kv_heads), torch.arange(200, 200 + num_kv_heads)
    rows = join_parts(QKV_BIAS, [q, k, v], spec, 0, 1).view(num_kv_heads, -1)
    pairs = {(int(head), int(group[-2]) - 100) for group in rows for head in group[:-2]}
    assert pairs == {(head, head // (8 // num_kv_heads)) for head in range(8)}
    assert torch.equal(rows[:, -1] - 100, rows[:, -2])


# ------------------------------------------------------------------------------------------- names and table


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
    weight = GATE_UP.for_layer(7)
    assert weight.megatron == "decoder.layers.7.mlp.linear_fc1.weight"
    assert weight.hf == ("model.layers.7.mlp.gate_proj.weight", "model.layers.7.mlp.up_proj.weight")
    assert weight.engine == "model.layers.7.mlp.gate_up_proj.weight"
    assert weight.split is Split.GATED


HF_SIZES = dict(
    hidden_size=24,
    intermediate_size=20,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=70,
    num_hidden_layers=2,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("LlamaForCausalLM", "lm"),
        ("Qwen2ForCausalLM", "lm"),
        ("LlamaForSequenceClassification", "score"),
        ("Qwen2ForSequenceClassification", "score"),
    ],
)
def test_the_table_lists_every_parameter_of_transformers_once(architecture: str, head: str, tied: bool) -> None:
    family = architecture.partition("For")[0]
    config = getattr(transformers, family + "Config")(
        **HF_SIZES, **({"head_dim": 3} if family == "Llama" else {}), tie_word_embeddings=tied, num_labels=1
    )
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    spec = tiny_spec(qkv_bias=family == "Qwen2", tied=tied and head == "lm")
    listed = [
        (name, shape)
        for weight in model_weights(spec, head)
        for name, shape in zip(weight.hf, weight.shapes(spec), strict=True)
    ]
    assert sorted(listed) == sorted((name, tuple(x.shape)) for name, x in model.named_parameters())


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


def test_names_of_megatron_and_engine_are_unique() -> None:
    weights = list(model_weights(tiny_spec(), "lm"))
    assert len({weight.megatron for weight in weights}) == len({weight.engine for weight in weights}) == len(weights)
