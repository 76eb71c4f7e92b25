"""Shards of weights by hand, made whole again bitwise, each element held once; of every weight of every family."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridflow.architecture.families import BY_NAME
from hybridflow.architecture.layer_kinds import LatentSizes
from hybridflow.architecture.parts import Block, blocks, read_shard, shard_shape, whole_parts, whole_shape
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.tables import LM_HEAD, VALUE_HEAD
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import embedding, layer_weights, model_weights
from hybridflow.parallel.layout import Cut, Place
from tests.grids import each


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
        tied=False,
        max_positions=64,
    )
    traits = BY_NAME[str(changes.get("family", fields["family"]))]
    experts = {"num_experts": 4, "experts_per_token": 2} if traits.experts else {}
    latent = (
        {"latent": LatentSizes(6, 7, 2, 2, value_dim=1), "mixers": ("latent",) * 2} if traits.mixer == "latent" else {}
    )
    return ModelSpec(**{**fields, **experts, **latent, **changes})


@dataclass
class Files:
    """Tensors of a checkpoint, in memory."""

    tensors: dict[str, Tensor]

    def read(self, name: str, shape: tuple[int, ...], rows: slice, columns: slice) -> Tensor:
        found = self.tensors[name]
        assert tuple(found.shape) == shape
        return found[rows] if found.dim() == 1 else found[rows, columns]


def shards(weight: Weight, parts: list[Tensor], spec: ModelSpec, tp: int, ep: int = 1) -> list[Tensor]:
    files = Files(dict(zip(weight.hf, parts, strict=True)))
    return [read_shard(files, weight, spec, place) for place in places(weight, tp, ep)]


def places(weight: Weight, tp: int, ep: int) -> tuple[Place, ...]:
    return Cut(tp, tp // ep, ep).places(weight.group)


def of_layer(family: str, name: str, **changes: object) -> tuple[Weight, ModelSpec]:
    spec = tiny_spec(family=family, **changes)
    return next(weight for weight in layer_weights(spec, spec.layer_kind(0)) if name in weight.megatron), spec


EVERY_WEIGHT = [
    pytest.param(family, weight, id=f"{family}-{weight.megatron}")
    for family in BY_NAME
    for weight in (*model_weights(tiny_spec(family=family, num_layers=1), "lm"), VALUE_HEAD)
]
each_weight = pytest.mark.parametrize(("family", "weight"), EVERY_WEIGHT)
SIZES = (1, 2, 4)  # of tensor parallelism
CUTS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))  # tp, ep


# --------------------------------------------------------------------------------------------------- by hand


def test_qkv_rows_by_hand() -> None:
    # 4 query heads of one element in 2 groups; row i of q is (i, i), of k (10 + i, ...), of v (20 + i, ...)
    weight, spec = of_layer("qwen2", "linear_qkv.weight", num_heads=4, num_kv_heads=2, head_dim=1, hidden_size=2)
    q, k, v = (torch.arange(n)[:, None].expand(n, 2) + first for n, first in [(4, 0), (2, 10), (2, 20)])
    whole = [[0, 0], [1, 1], [10, 10], [20, 20], [2, 2], [3, 3], [11, 11], [21, 21]]
    assert shards(weight, [q, k, v], spec, 1)[0].tolist() == whole
    assert [shard.tolist() for shard in shards(weight, [q, k, v], spec, 2)] == [whole[:4], whole[4:]]
    assert blocks(weight, spec) == (
        Block(0, 0, 0, 2),
        Block(1, 0, 2, 1),
        Block(2, 0, 3, 1),
        Block(0, 2, 4, 2),
        Block(1, 1, 6, 1),
        Block(2, 1, 7, 1),
    )
    bias, _ = of_layer("qwen2", "linear_qkv.bias")
    assert shards(bias, [part[:, 0] for part in (q, k, v)], spec, 1)[0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_qkv_rows_of_ranks_that_share_a_group_by_hand() -> None:
    # 8 query heads of one element in 2 groups, 4 ranks: each group [q q q q k v] is cut in the middle
    bias, spec = of_layer("qwen2", "linear_qkv.bias", num_heads=8, num_kv_heads=2, head_dim=1)
    parts = [torch.arange(8), torch.arange(10, 12), torch.arange(20, 22)]
    assert [shard.tolist() for shard in shards(bias, parts, spec, 4)] == [
        *[[0, 1, 2], [3, 10, 20]],
        *[[4, 5, 6], [7, 11, 21]],
    ]


def test_qkv_rows_of_wider_heads_by_hand() -> None:
    # 2 heads of 2 elements in 2 groups: q0 q0' k0 k0' v0 v0' q1 ...
    bias, spec = of_layer("qwen2", "linear_qkv.bias", num_heads=2, num_kv_heads=2, head_dim=2)
    parts = [torch.arange(4), torch.arange(10, 14), torch.arange(20, 24)]
    assert shards(bias, parts, spec, 1)[0].tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_gated_rows_by_hand(family: str) -> None:
    # each rank holds its rows of gate above its rows of up, whether they come as two tensors or as one
    weight, spec = of_layer(family, "linear_fc1", ffn_hidden_size=4, hidden_size=1)
    gate, up = torch.arange(4)[:, None], torch.arange(10, 14)[:, None]
    parts = [torch.cat([gate, up])] if family == "glm" else [gate, up]
    assert [shard.flatten().tolist() for shard in shards(weight, parts, spec, 2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_experts_by_hand() -> None:
    # 2 experts; gate, up of the first, gate, up of the second: each rank has its share of all
    sizes = dict(num_experts=2, ffn_hidden_size=2, hidden_size=1)
    weight, spec = of_layer("mixtral", "experts.linear_fc1", **sizes)
    parts = [torch.tensor([[first], [first + 1]]) for first in (0, 10, 20, 30)]
    assert weight.hf[2] == "model.layers.{layer}.block_sparse_moe.experts.1.w1.weight"
    assert whole_shape(weight, spec) == (2, 4, 1)
    assert [shard.tolist() for shard in shards(weight, parts, spec, 2)] == [
        [[[0], [10]], [[20], [30]]],
        [[[1], [11]], [[21], [31]]],
    ]
    down, _ = of_layer("mixtral", "experts.linear_fc2", **sizes)
    parts = [torch.tensor([[0, 1]]), torch.tensor([[10, 11]])]
    assert [shard.tolist() for shard in shards(down, parts, spec, 2)] == [[[[0]], [[10]]], [[[1]], [[11]]]]


def test_columns_by_hand() -> None:
    weight, spec = of_layer("llama", "linear_fc2", ffn_hidden_size=4, hidden_size=2)
    down = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert [shard.tolist() for shard in shards(weight, [down], spec, 2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_rows_of_a_bias_by_hand() -> None:
    weight, spec = of_layer("opt", "linear_fc1.bias", ffn_hidden_size=4)
    assert [shard.tolist() for shard in shards(weight, [torch.arange(4)], spec, 2)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("weight", [embedding(tiny_spec()), LM_HEAD], ids=["embedding", "lm_head"])
@each(tp=SIZES)
def test_rows_past_the_vocabulary_are_zero(weight: Weight, tp: int) -> None:
    # 70 rows padded to 128: with tp 4 of 32 rows each, rank 2 holds 6 true ones and rank 3 none
    spec = tiny_spec()
    parts = numbered_parts(weight, spec)
    found = shards(weight, parts, spec, tp)
    assert all(shard.shape == (128 // tp, 24) for shard in found)
    stacked = torch.cat(found)
    assert torch.equal(stacked[:70], parts[0])
    assert (stacked[70:] == 0).all()
    assert whole_shape(weight, spec) == (70, 24)


# ------------------------------------------------------------------------------------- inverse and coverage


def numbered_parts(weight: Weight, spec: ModelSpec) -> list[Tensor]:
    """The HuggingFace parts, holding 1, 2, 3, ...: no two elements of any of them are equal."""
    shapes = weight.shapes(spec)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    numbers = torch.arange(1, sum(sizes) + 1).split(sizes)
    return [part.view(shape) for part, shape in zip(numbers, shapes, strict=True)]


@each_weight
@each(cut=CUTS, num_kv_heads=(1, 2, 4, 8))
def test_whole_parts_undoes_read_shard_bitwise(
    family: str, weight: Weight, cut: tuple[int, int], num_kv_heads: int
) -> None:
    """In bfloat16: a copy is that of any other dtype."""
    spec = tiny_spec(family=family, num_kv_heads=num_kv_heads, head_dim=4)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator).bfloat16() for shape in weight.shapes(spec)]
    tp, ep = cut
    found = shards(weight, parts, spec, tp, ep)
    held = [shard for shard in found if weight.split is not Split.VOCAB or shard.count_nonzero()]
    assert all(shard.dtype == torch.bfloat16 for shard in held)
    assert all(shard.shape == shard_shape(weight, spec, Cut(tp, tp // ep, ep)) for shard in found)
    back = whole_parts(weight, found, spec, places(weight, tp, ep))
    assert len(back) == len(parts)
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))


@each_weight
@each(cut=CUTS, num_kv_heads=(2, 4))
def test_shards_hold_every_element_once(family: str, weight: Weight, cut: tuple[int, int], num_kv_heads: int) -> None:
    spec = tiny_spec(family=family, num_kv_heads=num_kv_heads)
    if spec.traits.attention.norms == "all" and cut[0] > num_kv_heads:
        return  # refused: the keys of all ranks have one norm
    parts = numbered_parts(weight, spec)
    found = shards(weight, parts, spec, *cut)
    everything = torch.cat([part.flatten() for part in parts])
    if weight.split is Split.REPLICATED:
        assert all(torch.equal(shard.flatten(), everything) for shard in found)
        return
    held = torch.cat([shard.flatten() for shard in found])
    assert torch.equal(held[held > 0].long().sort().values, everything)
    assert (held == 0).sum() == (58 * 24 if weight.split is Split.VOCAB else 0)


@each_weight
def test_blocks_cover_the_whole_parameter_and_every_part(family: str, weight: Weight) -> None:
    spec = tiny_spec(family=family)
    found, shape = blocks(weight, spec), whole_shape(weight, spec)
    rows = [row for block in found for row in range(block.row, block.row + block.rows)]
    assert rows == list(range(shape[0] * shape[1] if weight.experts else shape[0]))
    for part, part_shape in enumerate(weight.shapes(spec)):
        its = [row for b in found if b.part == part for row in range(b.start, b.start + b.rows)]
        assert sorted(its) == list(range(part_shape[0]))  # queries, keys and values may lie in one part


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_grouped_queries_stay_with_their_key(num_kv_heads: int) -> None:
    """Element h of q and element g of k stand in one group exactly where transformers' repeat_kv pairs them."""
    bias, spec = of_layer("qwen2", "linear_qkv.bias", num_kv_heads=num_kv_heads, head_dim=1)
    parts = [torch.arange(8), torch.arange(100, 100 + num_kv_heads), torch.arange(200, 200 + num_kv_heads)]
    rows = shards(bias, parts, spec, 1)[0].view(num_kv_heads, -1)
    pairs = {(int(head), int(group[-2]) - 100) for group in rows for head in group[:-2]}
    assert pairs == {(head, head // (8 // num_kv_heads)) for head in range(8)}
    assert torch.equal(rows[:, -1] - 100, rows[:, -2])
