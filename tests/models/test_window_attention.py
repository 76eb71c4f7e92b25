"""Attention within a window by a mask written here, token by token; and what families with windows have besides."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen

from hybridflow.models import window_attention
from hybridflow.models.attention import PackedSequences, attention_by_length, choose_by_sharing
from hybridflow.models.context import Context, ContextSpans, most_tokens, pieces_of, places
from hybridflow.models.layers import GeGLU, WideHeadNorm
from hybridflow.models.shared_prompt import SharedPrompts, attention_with_copies
from hybridflow.models.window_attention import attend_in_window

# two responses alone, prompts of 9 and 2 tokens, what follows the first and the second, and padding
LENGTHS, GROUPS, ALONE = (12, 3, 9, 2, 4, 11, 1, 7, 5), [(9, (4, 11)), (2, (1, 7))], 15
PARENTS = (None, None, None, None, 2, 2, 3, 3, None)
CPU, SCALE = torch.device("cpu"), 0.3
WINDOWS = (1, 2, 5, 64)


def packed(shared: bool) -> PackedSequences:
    prompts = SharedPrompts.from_lengths(GROUPS, start=ALONE, device=CPU) if shared else None
    return PackedSequences.from_lengths(LENGTHS, CPU, prompts)


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(LENGTHS), heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def reachable(window: int | None, shared: bool) -> Tensor:
    """(t, t) whether a query reaches a key, by where both stand in their sequences."""
    owner = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    parents = [parent if shared and parent is not None else -1 for parent in PARENTS]
    before = torch.tensor([LENGTHS[parent] if parent >= 0 else 0 for parent in parents])
    place = torch.cat([torch.arange(length) for length in LENGTHS]) + before[owner]
    seen = (owner[:, None] == owner) | (torch.tensor(parents)[owner][:, None] == owner)
    back = place[:, None] - place
    return seen & (back >= 0) & (back < (window or sum(LENGTHS)))


def by_hand(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), value)


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shared", [False, True])
def test_outputs_and_gradients_are_those_of_a_mask(window: int, shared: bool) -> None:
    inputs = leaves()
    found = with_gradients(
        attend_in_window(window, by_varlen=False)(*inputs, packed=packed(shared), scale=SCALE), inputs
    )
    expected = with_gradients(by_hand(*inputs, reachable(window, shared)), inputs)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True))


def kernel(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, **options: Any) -> Tensor:
    """What torch's kernel computes by its documentation: the queries of a sequence are the last of its keys."""
    query_bounds, key_bounds, longest_query, longest_key = bounds
    (back, ahead), outputs = options["window_size"], []
    for i in range(len(query_bounds) - 1):
        q = query[query_bounds[i] : query_bounds[i + 1]]
        k, v = (x[key_bounds[i] : key_bounds[i + 1]] for x in (key, value))
        assert len(q) <= longest_query and len(k) <= longest_key and ahead == 0
        distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        outputs.append(by_hand(q, k, v, (distance >= 0) & (distance <= back)))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shared", [False, True])
def test_one_kernel_is_given_the_keys_in_reach(window: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    inputs = leaves(torch.float32)
    found = with_gradients(
        attend_in_window(window, by_varlen=True)(*inputs, packed=packed(shared), scale=SCALE), inputs
    )
    expected = with_gradients(by_hand(*inputs, reachable(window, shared)), inputs)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(found, expected, strict=True))


class _Sent(Exception):
    """In the place of what arrives."""


def over_ranks(inputs: list[Tensor], lengths: tuple[int, ...], size: int, window: int, **how: bool) -> Tensor:
    """(t, heads, head_dim) of ranks that share the tokens, each with a token of padding at least, in one process."""
    followed = {2: (4, 5), 3: (6, 7)} if how["shared"] else {}
    most = most_tokens(lengths, Context(size, 0, None)) + 1
    own, calls = [], []
    for rank in range(size):
        context = Context(size, rank, None)
        pieces = pieces_of(lengths, context)
        own.append(places(pieces, lengths))
        missing = most - len(own[-1])
        spans = ContextSpans.of(lengths, [*followed.items()], context, most, CPU)
        parts = PackedSequences.from_lengths((*(piece.length for piece in pieces), missing), CPU)
        of_rank = [torch.cat([x[own[-1]], x.new_zeros(missing, *x.shape[1:])]) for x in inputs]
        attend = attend_in_window(window, by_varlen=how["by_varlen"])
        calls.append(partial(attend, *of_rank, packed=replace(parts, context=spans), scale=SCALE))
    sent: list[Tensor] = []

    def first(ends: Tensor, context: Context) -> Tensor:
        sent.append(ends)
        raise _Sent

    for call in calls:
        with mock.patch.object(window_attention, "of_all_ranks", first), pytest.raises(_Sent):
            call()
    assert len({len(ends) for ends in sent}) == 1, "collectives take as much of every rank"
    with mock.patch.object(window_attention, "of_all_ranks", lambda ends, context: torch.cat(sent)):
        outputs = [call()[: len(tokens)] for call, tokens in zip(calls, own, strict=True)]
    return torch.cat(outputs)[torch.cat(own).argsort()]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("by_varlen", [False, True])
def test_ranks_that_share_tokens_find_the_same(
    size: int, window: int, shared: bool, by_varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    inputs = leaves(torch.float32 if by_varlen else torch.float64)
    found = with_gradients(over_ranks(inputs, LENGTHS, size, window, shared=shared, by_varlen=by_varlen), inputs)
    expected = with_gradients(by_hand(*inputs, reachable(window, shared)), inputs)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(found, expected, strict=True))


def test_a_rank_without_any_piece_sends_as_much() -> None:
    inputs = [x[:2] for x in leaves()]
    found = over_ranks(inputs, (2,), 4, 5, shared=False, by_varlen=False)
    whole = attention_by_length(*inputs, packed=PackedSequences.from_lengths((2,), CPU), scale=SCALE)
    assert torch.allclose(found, whole, rtol=0, atol=1e-6)  # what others send is summed up in float32


@pytest.mark.parametrize("shared", [False, True])
def test_a_window_that_is_forgotten_would_be_seen(shared: bool) -> None:
    inputs, everything = leaves(), choose_by_sharing(attention_by_length, attention_with_copies)
    whole = everything(*inputs, packed=packed(shared), scale=SCALE)
    assert torch.allclose(whole, by_hand(*inputs, reachable(None, shared)), rtol=0, atol=1e-12)
    out = attend_in_window(5, by_varlen=False)(*inputs, packed=packed(shared), scale=SCALE)
    assert (out - whole).abs().amax((1, 2)).gt(1e-2).sum() > 10


def test_the_gate_goes_through_gelu() -> None:
    x = torch.randn(3, 5, 14, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    expected = with_gradients(nn.functional.gelu(gate, approximate="tanh") * up, [x])
    found = with_gradients(GeGLU(None)(x), [x])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True))


def test_a_wide_norm_is_over_all_heads() -> None:
    """On one rank; on two in the parity of OLMo 3."""
    config: Any = SimpleNamespace(tensor_model_parallel_size=1, params_dtype=torch.float32)
    norm = WideHeadNorm(config, 6, 1e-5, heads=4)
    norm.group = SimpleNamespace(size=lambda: 1)
    nn.init.normal_(norm.weight)
    x = torch.randn(7, 1, 4, 6, requires_grad=True)
    expected = nn.functional.rms_norm(x.flatten(-2), (24,), norm.weight, 1e-5).unflatten(-1, (4, 6))
    inputs = [x, norm.weight]
    pairs = zip(with_gradients(norm(x), inputs), with_gradients(expected, inputs), strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in pairs)
