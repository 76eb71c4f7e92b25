"""A decoder's layer by one call: beside its kernels called one by one, to the bit, and its equations in float64."""

import ctypes
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.kernels.decoder import KINDS, WEIGHTS, DecoderLayer, Keys, Sizes
from hybridflow.cpu.kernels.layers import add_rms_norm, rms_norm, rotate, swiglu
from hybridflow.cpu.kernels.linear import linear
from hybridflow.cpu.kernels.paged import attend, store
from tests.grids import each

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.usefixtures("needs_kernels"),
    pytest.mark.usefixtures("kernels"),
]
SIZES = Sizes(width=48, heads=4, kv_heads=2, dims=32, turning=16, hidden=80, eps=1e-5, scale=0.2)
BLOCK, POSITIONS = 16, 64
STEPS = ((5, 20, 0), (1, 1, 1), (1, 1, 3))  # tokens of each sequence that come
PLAIN = ("first_norm", "qkv", "out", "second_norm", "gate_up", "down")
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(sizes: Sizes, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Products of such weights are about as large as what they multiply."""
    queries, keys = sizes.heads * sizes.dims, sizes.kv_heads * sizes.dims
    shapes = {
        "first_norm": (sizes.width,),
        "qkv": (queries + 2 * keys, sizes.width),
        "qkv_bias": (queries + 2 * keys,),
        "query_norm": (sizes.dims,),
        "key_norm": (sizes.dims,),
        "out": (sizes.width, queries),
        "out_bias": (sizes.width,),
        "second_norm": (sizes.width,),
        "gate_up": (2 * sizes.hidden, sizes.width),
        "gate_up_bias": (2 * sizes.hidden,),
        "down": (sizes.width, sizes.hidden),
        "down_bias": (sizes.width,),
    }
    assert tuple(shapes) == WEIGHTS
    weights = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        if name in names:
            scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
            weights[name] = (drawn(*shape, seed=seed, dtype=torch.float32) * scale).to(dtype)
    return weights


def rotation_of(sizes: Sizes, dtype: torch.dtype) -> Tensor:
    angles = torch.arange(POSITIONS)[:, None] * 0.7 ** torch.arange(sizes.turning)
    return torch.cat((angles.cos(), angles.sin()), 1).to(dtype)


def steps(dtype: torch.dtype, sizes: Sizes) -> list[tuple[Tensor, Keys]]:
    """Positions of the tokens of each step, and where their keys go: sequences whose blocks are mixed up."""
    cache = torch.zeros(7, sizes.kv_heads, BLOCK, 2 * sizes.dims, dtype=dtype)
    table = torch.tensor([[3, 0], [6, 1], [2, 5]], dtype=torch.int32)
    before, found = [0, 0, 0], []
    for news in STEPS:
        rows = [i for i, new in enumerate(news) if new]
        at = [torch.arange(before[i], before[i] + news[i]) for i in rows]
        before = [old + new for old, new in zip(before, news, strict=True)]
        slots = torch.cat([table[i, t // BLOCK].long() * BLOCK + t % BLOCK for i, t in zip(rows, at, strict=True)])
        starts = torch.tensor([0, *(news[i] for i in rows)]).cumsum(0).int()
        lengths = torch.tensor([before[i] for i in rows], dtype=torch.int32)
        found.append((torch.cat(at), Keys(cache, table[rows], starts, lengths, slots, max(before))))
    return found


def one_by_one(sizes: Sizes, x: Tensor, residual: Tensor | None, w: dict[str, Tensor], at: Tensor, keys: Keys) -> tuple:
    """By the kernels that each have tests of their own."""
    if residual is None:
        residual, normed = x, rms_norm(x, w["first_norm"], sizes.eps)[0]
    else:
        normed = add_rms_norm(x, residual, w["first_norm"], sizes.eps)
    heads = linear(normed, w["qkv"], w.get("qkv_bias")).view(len(x), -1, sizes.dims)
    query, key, value = heads.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], 1)
    if "query_norm" in w:
        query = rms_norm(query, w["query_norm"], sizes.eps)[0]
        key = rms_norm(key, w["key_norm"], sizes.eps)[0]
    cos, sin = rotation_of(sizes, x.dtype)[at][:, None].chunk(2, -1)
    query, key, seen = rotate(query, cos, sin), rotate(key, cos, sin), torch.empty_like(query)
    store(key, value, keys.cache, keys.slots)
    about = {"table": keys.table, "starts": keys.starts, "lengths": keys.lengths, "longest": keys.longest}
    attend(query, keys.cache, seen.view(query.shape), **about, scale=sizes.scale)
    out = linear(seen.flatten(1), w["out"], w.get("out_bias"))
    normed = add_rms_norm(out, residual, w["second_norm"], sizes.eps)
    hidden = swiglu(linear(normed, w["gate_up"], w.get("gate_up_bias")))
    return linear(hidden, w["down"], w.get("down_bias")), residual


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(first=(True, False), names=(PLAIN, (*PLAIN, "query_norm", "key_norm"), WEIGHTS), turning=(16, 8))
def test_it_is_its_kernels_one_after_the_other(
    first: bool, names: tuple[str, ...], turning: int, dtype: torch.dtype
) -> None:
    sizes = replace(SIZES, turning=turning)
    layer, weights = DecoderLayer(sizes, dtype), weights_of(sizes, names, dtype)
    for seed, ((at, mine), (_, theirs)) in enumerate(zip(steps(dtype, sizes), steps(dtype, sizes), strict=True)):
        x = drawn(len(at), sizes.width, seed=seed, dtype=dtype)
        before = None if first else drawn(len(at), sizes.width, seed=9, dtype=dtype)
        expected = one_by_one(sizes, x.clone(), None if first else before.clone(), weights, at, theirs)
        given = x.clone()
        y, residual = layer(given, before, weights, positions=at, rotation=rotation_of(sizes, dtype), keys=mine)
        assert torch.equal(y, expected[0]) and torch.equal(residual, expected[1])
        assert residual is (given if first else before)
        assert torch.equal(mine.cache, theirs.cache)
        mine.cache.copy_(theirs.cache)


def in_float64(sizes: Sizes, x: Tensor, w: dict[str, Tensor], rotation: Tensor) -> Tensor:
    """The first layer over a sequence from its beginning, (tokens, width) -> what goes on and the sum before it."""
    w = {name: weight.double() for name, weight in w.items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + sizes.eps).rsqrt() * weight

    tokens, x = len(x), x.double()
    heads = (norm(x, w["first_norm"]) @ w["qkv"].T + w["qkv_bias"]).view(tokens, -1, sizes.dims).transpose(0, 1)
    query, key, value = heads.split([sizes.heads, sizes.kv_heads, sizes.kv_heads])
    query, key = norm(query, w["query_norm"]), norm(key, w["key_norm"])
    cos, sin = rotation[:tokens].double().chunk(2, -1)

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    seen = torch.nn.functional.scaled_dot_product_attention(
        turned(query), turned(key), value, is_causal=True, scale=sizes.scale, enable_gqa=True
    )
    total = x + seen.transpose(0, 1).flatten(1) @ w["out"].T + w["out_bias"]
    gate, up = (norm(total, w["second_norm"]) @ w["gate_up"].T + w["gate_up_bias"]).chunk(2, -1)
    return torch.cat((torch.nn.functional.silu(gate) * up @ w["down"].T + w["down_bias"], total))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_equals_its_equations(dtype: torch.dtype) -> None:
    """A prompt of four tokens and then three tokens one by one, whose keys are in two blocks."""
    weights, rotation = weights_of(SIZES, WEIGHTS, dtype), rotation_of(SIZES, dtype)
    x, layer = drawn(18, SIZES.width, seed=1, dtype=dtype), DecoderLayer(SIZES, dtype)
    cache = torch.zeros(5, SIZES.kv_heads, BLOCK, 2 * SIZES.dims, dtype=dtype)
    table, found = torch.tensor([[4, 1]], dtype=torch.int32), []
    for first, last in ((0, 15), (15, 16), (16, 17), (17, 18)):
        at = torch.arange(first, last)
        starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, last - first], [last]))
        keys = Keys(cache, table, starts, lengths, table[0, at // BLOCK].long() * BLOCK + at % BLOCK, last)
        found.append(layer(x[at].clone(), None, weights, positions=at, rotation=rotation, keys=keys))
    mine = torch.cat([torch.cat(parts) for parts in zip(*found, strict=True)]).double()
    right = in_float64(SIZES, x, weights, rotation)
    assert (mine - right).abs().max() <= TOLERANCES[dtype] * right.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_again_is_a_call_on_what_the_memory_now_holds(first: bool, dtype: torch.dtype) -> None:
    """A token that follows, in the tensors of the one before; beside a new layer with tensors of its own."""
    weights, rotation = weights_of(SIZES, WEIGHTS, dtype), rotation_of(SIZES, dtype)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    found = []
    for anew in (True, False):
        layer, cache = DecoderLayer(SIZES, dtype), drawn(3, SIZES.kv_heads, BLOCK, 2 * SIZES.dims, seed=5, dtype=dtype)
        at, starts, lengths, slots = (
            torch.tensor(numbers) for numbers in ([BLOCK - 1], [0, 1], [BLOCK], [BLOCK * 3 - 1])
        )
        x, residual = (
            drawn(1, SIZES.width, seed=1, dtype=dtype),
            None if first else drawn(1, SIZES.width, seed=2, dtype=dtype),
        )
        keys = Keys(cache, table, starts.int(), lengths.int(), slots, BLOCK)
        layer(x, residual, weights, positions=at, rotation=rotation, keys=keys)
        if anew:
            x, layer = drawn(1, SIZES.width, seed=3, dtype=dtype), DecoderLayer(SIZES, dtype)
            keys = Keys(cache, table, starts.int(), lengths.int() + 1, torch.tensor([0]), BLOCK + 1)
            y, residual = layer(x, residual, weights, positions=at + 1, rotation=rotation, keys=keys)
        else:
            layer.given.x.copy_(drawn(1, SIZES.width, seed=3, dtype=dtype))
            at.add_(1), keys.lengths.add_(1), slots.zero_()
            layer.again(BLOCK + 1)
            y, residual = layer.given.y, layer.given.residual
        found.append((y, residual, cache))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_seconds_are_told_by_kind() -> None:
    """They add up to what the call took, but for what Python took of it."""
    weights, rotation = weights_of(SIZES, WEIGHTS, torch.float32), rotation_of(SIZES, torch.float32)
    at, keys = steps(torch.float32, SIZES)[0]
    seconds = (ctypes.c_double * len(KINDS))()
    layer, x = DecoderLayer(SIZES, torch.float32), drawn(len(at), SIZES.width, seed=1, dtype=torch.float32)
    began = time.perf_counter()
    layer(x, None, weights, positions=at, rotation=rotation, keys=keys, seconds=seconds)
    took = time.perf_counter() - began
    assert all(part > 0 for part in seconds)
    assert sum(seconds) < took
