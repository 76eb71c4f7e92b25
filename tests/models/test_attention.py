"""Attention over packed sequences against a softmax written out, sequence by sequence, in float64."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.attention import rotated
from hybridflow.cpu.layers import TurnedHeads
from hybridflow.models import attention
from hybridflow.models.attention import (
    AttentionFunctions,
    GroupedSelfAttention,
    PackedAttention,
    PackedSequences,
    Rotate,
    attention_by_length,
    halves,
    neighbours,
    rotation,
)

CPU = torch.device("cpu")
SCALE = 0.3
FUNCTIONS = AttentionFunctions(attention_by_length, rotation(halves))


def qkv(lengths: tuple[int, ...], *, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    shapes = [(sum(lengths), count, 4) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def naive_attention(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Token by token: softmax of scaled products with the tokens up to it, in its own sequence."""
    per_group = query.shape[1] // key.shape[1]
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        for t in range(len(q)):
            for head in range(q.shape[1]):
                group = head // per_group
                weights = torch.softmax(SCALE * k[: t + 1, group] @ q[t, head], dim=0)
                outputs.append(weights @ v[: t + 1, group])
    return torch.stack(outputs).view_as(query)


@pytest.mark.parametrize(
    ("gate", "softmax", "message"),
    [
        (True, "vanilla", "cut by the global tensor-parallel rank"),
        (False, "learnable", "softmax_type learnable: PackedAttention leaves out sinks"),
        (False, "off-by-one", "softmax_type off-by-one"),
    ],
)
def test_what_megatron_does_by_its_global_groups_is_refused(gate: bool, softmax: str, message: str) -> None:
    config = SimpleNamespace(attention_output_gate=gate, softmax_type=softmax)
    with pytest.raises(AssertionError, match=message):
        GroupedSelfAttention(config)


class WithoutBias(torch.nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


@pytest.mark.parametrize("norms", [(None, None), (torch.neg, torch.abs)], ids=["none", "some"])
@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_share_a_group_of_heads(
    rank: int, norms: tuple[Callable | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 ranks, 2 groups of 2 queries, key, value."""
    rows = torch.arange(3 * 2 * 4 * 5, dtype=torch.float32).view(3, 1, 40)
    layer = GroupedSelfAttention.__new__(GroupedSelfAttention)
    torch.nn.Module.__init__(layer)
    layer.pg_collection = SimpleNamespace(tp=SimpleNamespace(size=lambda: 4, rank=lambda: rank))
    layer.config = SimpleNamespace(num_query_groups=2, num_attention_heads=4)
    layer.hidden_size_per_attention_head, layer.linear_qkv = 5, WithoutBias()
    layer.q_layernorm, layer.k_layernorm = norms
    monkeypatch.setattr(attention, "all_gather_last_dim_from_tensor_parallel_region", lambda x, group: x)
    query, key, value = layer.get_query_key_value_tensors(rows)
    own, (norm_query, norm_key) = rows.view(3, 1, 2, 4, 5)[:, :, rank // 2], norms
    expected = own[:, :, [rank % 2]], own[:, :, [2]], own[:, :, [3]]
    assert torch.equal(query, expected[0] if norm_query is None else norm_query(expected[0]))
    assert torch.equal(key, expected[1] if norm_key is None else norm_key(expected[1]))
    assert torch.equal(value, expected[2])


LENGTHS = [(1,), (5,), (3, 3, 3), (6, 4, 4, 1, 1, 1), (2, 5, 2, 2)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_naive_attention_forward_and_backward(lengths: tuple[int, ...], heads: int, kv_heads: int) -> None:
    packed = PackedSequences.from_lengths(lengths, CPU)
    leaves = [x.requires_grad_() for x in qkv(lengths, heads=heads, kv_heads=kv_heads)]
    actual = attention_by_length(*leaves, packed=packed, scale=SCALE)
    expected = naive_attention(*leaves, lengths)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for mine, naive in zip(
        torch.autograd.grad((actual * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, naive, rtol=1e-12, atol=1e-12)


def test_two_tokens_by_hand() -> None:
    # the first token sees itself; the second weighs 10 and 20 with softmax(0, log 3) = (1/4, 3/4)
    query = torch.tensor([7.0, 1.0]).view(2, 1, 1)
    key = torch.tensor([0.0, 1.0986122886681098]).view(2, 1, 1)
    value = torch.tensor([10.0, 20.0]).view(2, 1, 1)
    out = attention_by_length(query, key, value, packed=PackedSequences.from_lengths((2,), CPU), scale=1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([10.0, 17.5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", range(4))
def test_a_sequence_does_not_reach_another(changed: int, dtype: torch.dtype) -> None:
    lengths = (5, 3, 3, 2)
    packed = PackedSequences.from_lengths(lengths, CPU)
    inputs = qkv(lengths, heads=4, kv_heads=2, dtype=dtype)
    before = attention_by_length(*inputs, packed=packed, scale=SCALE).split(lengths)
    for x in inputs:
        x.split(lengths)[changed].mul_(-3.0)
    after = attention_by_length(*inputs, packed=packed, scale=SCALE).split(lengths)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [i != changed for i in range(4)]


@pytest.mark.parametrize("changed", range(5))
def test_a_token_does_not_reach_the_tokens_before_it(changed: int) -> None:
    packed = PackedSequences.from_lengths((5,), CPU)
    inputs = qkv((5,), heads=4, kv_heads=2)
    before = attention_by_length(*inputs, packed=packed, scale=SCALE)
    for x in inputs[1:]:
        x[changed] += 1.0
    after = attention_by_length(*inputs, packed=packed, scale=SCALE)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [t < changed for t in range(5)]


@pytest.mark.parametrize(
    ("lengths", "runs", "bounds"),
    [
        ((4,), [(1, 4)], [0, 4]),
        ((6, 4, 4, 1, 1, 1), [(1, 6), (2, 4), (3, 1)], [0, 6, 10, 14, 15, 16, 17]),
        ((2, 5, 2, 2), [(1, 2), (1, 5), (2, 2)], [0, 2, 7, 9, 11]),
    ],
)
def test_packed_sequences_by_hand(lengths: tuple[int, ...], runs: list[tuple[int, int]], bounds: list[int]) -> None:
    packed = PackedSequences.from_lengths(lengths, CPU)
    assert packed.runs() == runs
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == bounds
    assert packed.max_seqlen_q == packed.max_seqlen_kv == max(lengths)
    assert packed.qkv_format is None  # else megatron splits the batch in every layer


@pytest.mark.parametrize(("given", "used"), [({}, 0.5), ({"softmax_scale": SCALE}, SCALE)])
def test_the_module_takes_and_gives_megatrons_shapes(given: dict[str, float], used: float) -> None:
    lengths = (3, 2)
    packed = PackedSequences.from_lengths(lengths, CPU)
    inputs = qkv(lengths, heads=4, kv_heads=2)
    module = PackedAttention(SimpleNamespace(kv_channels=4), 1, None, "self", functions=FUNCTIONS, **given)
    angles = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    rotated = packed.with_rotary(angles, inputs[0].dtype)
    out = module(*(x[:, None] for x in inputs), None, packed_seq_params=rotated)
    query, key = (by_hand(x, angles.to(x.dtype)) for x in inputs[:2])
    expected = attention_by_length(query, key, inputs[2], packed=packed, scale=used)
    assert torch.allclose(out, expected.reshape(5, 1, 16), atol=1e-6)


def by_hand(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Each pair (x_i, x_{i + half}) turned by its angle, as complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_rotation_literals_and_gradient() -> None:
    """A quarter turn takes (a, b) to (-b, a); the gradient is turned back."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], requires_grad=True)  # halves (1, 2) and (3, 4)
    cos, sin = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])  # a quarter turn, and none
    out = Rotate.apply(x, cos, sin, halves)
    assert out.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]
    (gradient,) = torch.autograd.grad(out, x, torch.tensor([[[10.0, 20.0, 30.0, 40.0]]]))
    assert gradient.tolist() == [[[30.0, 20.0, -10.0, 40.0]]]


@pytest.mark.compiles
@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "queries"), [(4, 1), (1, 3), (2, 3)])
def test_heads_turned_where_they_lie_are_those_of_a_split_and_a_rotation(
    groups: int, queries: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(groups)
    mixed = torch.randn(70, groups, queries + 2, 12, generator=generator).to(dtype)
    angles = torch.randn(70, 4, generator=generator)  # 8 of 12 dimensions turn
    cos, sin = (table[:, None].to(dtype) for table in (angles.cos(), angles.sin()))
    leaf, other = mixed.clone().requires_grad_(), mixed.clone().requires_grad_()
    projected = leaf * 1.0
    heads = TurnedHeads.apply(projected, cos, sin)
    query, key, value = other[:, :, :-2].flatten(1, 2), other[:, :, -2], other[:, :, -1]
    expected = rotated(query, cos, sin), rotated(key, cos, sin), value
    for found, right in zip(heads, expected, strict=True):
        assert torch.equal(found, right)
    where = projected.untyped_storage().data_ptr()
    kept = [x.untyped_storage().data_ptr() == where for x in heads]
    assert kept == [groups == 1 or queries == 1, True, True]  # else queries of several groups are put side by side
    grads = [torch.randn(x.shape, generator=generator).to(dtype) for x in heads]
    torch.autograd.backward(heads, grads)
    torch.autograd.backward(expected, grads)
    assert torch.equal(leaf.grad, other.grad)


def test_neighbours_turn_together_and_the_rest_stays() -> None:
    """As in GLM-4: a quarter turn of the first two dimensions, none of the next two; the last two never turn."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]], requires_grad=True)
    cos, sin = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    out = Rotate.apply(x, cos, sin, neighbours)
    assert out.tolist() == [[[-2.0, 1.0, 3.0, 4.0, 5.0, 6.0]]]
    (gradient,) = torch.autograd.grad(out, x, torch.tensor([[[10.0, 20.0, 30.0, 40.0, 50.0, 60.0]]]))
    assert gradient.tolist() == [[[20.0, -10.0, 30.0, 40.0, 50.0, 60.0]]]


def test_without_angles_nothing_turns() -> None:
    lengths = (3, 2)
    packed = PackedSequences.from_lengths(lengths, CPU)
    inputs = qkv(lengths, heads=4, kv_heads=4)
    module = PackedAttention(SimpleNamespace(kv_channels=4), 1, None, "self", functions=FUNCTIONS)
    out = module(*(x[:, None] for x in inputs), None, packed_seq_params=packed)
    assert torch.equal(out, attention_by_length(*inputs, packed=packed, scale=0.5).reshape(5, 1, 16))
