"""The gated delta rule and its convolution: by the recurrence, packed, with shared prompts; fla's calls; what is wrong.

The recurrence is written out here token by token, in float64.
"""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from hybridflow.errors import EnvironmentProblem
from hybridflow.models.attention import PackedSequences
from hybridflow.models.delta_rule import (
    NO_PARENT,
    Sequences,
    causal_convolution,
    delta_rule,
    delta_rule_with_states,
)
from hybridflow.models.layer_classes import delta_rule_by_fla
from hybridflow.models.shared_prompt import SharedPrompts

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 16, 8, 4
# lengths around the 64 tokens of a chunk, and one of a single token
ALONE = Sequences((5, 70, 1, 130, 64), (NO_PARENT,) * 5)
# a sequence alone, two prompts and what follows each, one shorter than the convolution; padding
SHARED = Sequences((9, 37, 80, 20, 2, 90, 3), (NO_PARENT, NO_PARENT, NO_PARENT, 1, 1, 2, NO_PARENT))
BOTH = pytest.mark.parametrize("sequences", [ALONE, SHARED], ids=["alone", "shared"])


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, decays before logsigmoid, rates before sigmoid."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (HEADS, VALUE_DIM), (HEADS,), (HEADS,))
    drawn = (torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in drawn]


def by_recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: equation 10 of arXiv 2412.06464."""
    outputs = []
    for t in range(len(q)):
        of_heads = []
        for head in range(HEADS):
            unit_q, unit_k = (x[t, head // (HEADS // KEY_HEADS)] for x in (q, k))
            unit_q, unit_k = (x / (x.square().sum() + 1e-6).sqrt() for x in (unit_q, unit_k))
            s = state[head] * decay[t, head].exp()
            s = s + rate[t, head] * torch.outer(unit_k, v[t, head] - s.T @ unit_k)
            of_heads.append((s, s.T @ unit_q / KEY_DIM**0.5))
        state = torch.stack([s for s, _ in of_heads])
        outputs.append(torch.stack([o for _, o in of_heads]))
    return torch.stack(outputs), state


def expected(tensors: list[Tensor], sequences: Sequences) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the state that each sequence leaves."""
    outputs, states = [], list[Tensor]()
    for number, piece in enumerate(torch.arange(len(tensors[0])).split(sequences.lengths)):
        parent = sequences.parents[number]
        begin = states[parent] if parent != NO_PARENT else tensors[0].new_zeros(HEADS, KEY_DIM, VALUE_DIM)
        out, state = by_recurrence(*(x[piece] for x in tensors), begin)
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs), states


def activated(raw: list[Tensor]) -> list[Tensor]:
    q, k, v, decay, rate = raw
    return [q, k, v, logsigmoid(decay + 3), rate.sigmoid()]


@BOTH
def test_chunks_of_packed_sequences_give_the_recurrence(sequences: Sequences) -> None:
    raw = inputs(sum(sequences.lengths))
    wanted, states = expected(activated(raw), sequences)
    found, left = delta_rule_with_states(*activated(raw), sequences=sequences)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(left, torch.stack(states), rtol=1e-9, atol=1e-12)
    upstream = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * upstream).sum(), raw),
        torch.autograd.grad((wanted * upstream).sum(), raw),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_it_is_computed_in_float32_at_least(dtype: torch.dtype, close: float) -> None:
    raw = inputs(sum(ALONE.lengths), dtype)
    wanted, _ = expected([x.double() for x in activated(raw)], ALONE)
    found = delta_rule(*activated(raw), sequences=ALONE)
    assert found.dtype == dtype
    assert (found.double() - wanted).abs().max() < close * wanted.abs().max()


@BOTH
def test_a_state_that_is_handed_on_is_as_good_as_one_sequence(sequences: Sequences) -> None:
    raw = activated(inputs(90))
    whole, state = delta_rule_with_states(*raw, sequences=Sequences((90,), (NO_PARENT,)))
    first, middle = delta_rule_with_states(*(x[:33] for x in raw), sequences=Sequences((33,), (NO_PARENT,)))
    rest = Sequences((57,), (NO_PARENT,))
    second, last = delta_rule_with_states(*(x[33:] for x in raw), sequences=rest, states=middle)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(last, state, rtol=1e-9, atol=1e-12)


def test_where_bounds_are_forgotten_states_leak() -> None:
    raw = activated(inputs(sum(ALONE.lengths)))
    right = delta_rule(*raw, sequences=ALONE)
    leaking = delta_rule(*raw, sequences=Sequences((sum(ALONE.lengths),), (NO_PARENT,)))
    assert (leaking - right).abs().max() > 0.3 * right.abs().max()


# ------------------------------------------------------------------------------------------------- convolution


def convolved(x: Tensor, weight: Tensor, sequences: Sequences) -> Tensor:
    """Each sequence by itself, with the last inputs of its parents before it."""
    pieces, outputs = x.split(sequences.lengths), []
    for number, piece in enumerate(pieces):
        before, parent = [], sequences.parents[number]
        while parent != NO_PARENT:
            before.insert(0, pieces[parent])
            parent = sequences.parents[parent]
        line = torch.cat([x.new_zeros(WIDTH - 1, x.shape[1]), *before, piece])
        windows = line.unfold(0, WIDTH, 1)[-len(piece) :]  # (t, d, width)
        outputs.append(silu((windows * weight).sum(-1)))
    return torch.cat(outputs)


@BOTH
def test_the_convolution_of_packed_sequences(sequences: Sequences) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(n, d, generator=generator, dtype=torch.float64)
        for n, d in ((sum(sequences.lengths), 6), (6, WIDTH))
    )
    x.requires_grad_(), weight.requires_grad_()
    found, wanted = causal_convolution(x, weight, sequences), convolved(x, weight, sequences)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * upstream).sum(), (x, weight)),
        torch.autograd.grad((wanted * upstream).sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------------------------------- sequences


def test_responses_continue_their_prompts() -> None:
    device = torch.device("cpu")
    shared = SharedPrompts.from_lengths([(37, (20, 2)), (80, (90,))], start=9, device=device)
    packed = PackedSequences.from_lengths((9, 37, 80, 20, 2, 90, 3), device, shared)
    assert packed.sequences == SHARED
    assert SHARED.levels == [[0, 1, 2, 6], [3, 4, 5]]
    alone = PackedSequences.from_lengths((3, 4), device)
    assert alone.sequences == Sequences((3, 4), (NO_PARENT, NO_PARENT))


# ------------------------------------------------------------------------------------------------- on GPUs


def simulated_fla(calls: list[SimpleNamespace]) -> dict[str, ModuleType]:
    """A chunk_gated_delta_rule that checks what fla 0.6.0 asks for, and computes by the recurrence."""

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert scale is None and use_qk_l2norm_in_kernel and cu_seqlens is not None
        assert {x.shape[:2] for x in (q, k, v, g, beta)} == {(1, int(cu_seqlens[-1]))}
        assert v.shape[2] % q.shape[2] == 0 and cu_seqlens.dtype == torch.int64
        lengths = tuple(cu_seqlens.diff().tolist())
        assert initial_state is None or initial_state.shape == (len(lengths), HEADS, KEY_DIM, VALUE_DIM)
        calls.append(SimpleNamespace(lengths=lengths, begins=initial_state is None))
        outputs, states = [], []
        for i, piece in enumerate(torch.arange(q.shape[1]).split(lengths)):
            begin = v.new_zeros(HEADS, KEY_DIM, VALUE_DIM) if initial_state is None else initial_state[i]
            out, state = by_recurrence(*(x[0, piece] for x in (q, k, v, g, beta)), begin)
            outputs.append(out)
            states.append(state)
        return torch.cat(outputs)[None], torch.stack(states) if output_final_state else None

    module = ModuleType("fla.ops.gated_delta_rule")
    vars(module)["chunk_gated_delta_rule"] = chunk_gated_delta_rule
    return {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops"), "fla.ops.gated_delta_rule": module}


@BOTH
def test_what_flas_kernels_are_asked_for(sequences: Sequences) -> None:
    raw, calls = inputs(sum(sequences.lengths)), list[SimpleNamespace]()
    with mock.patch.dict(sys.modules, simulated_fla(calls)):
        found = delta_rule_by_fla(*activated(raw), sequences=sequences)
    wanted = delta_rule(*activated(raw), sequences=sequences)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    upstream = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * upstream).sum(), raw),
        torch.autograd.grad((wanted * upstream).sum(), raw),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    if sequences is ALONE:
        assert [(call.lengths, call.begins) for call in calls] == [(ALONE.lengths, True)]
    else:
        assert [(call.lengths, call.begins) for call in calls] == [((9, 37, 80, 3), True), ((20, 2, 90), False)]


def test_without_fla_a_gpu_says_what_to_install() -> None:
    with mock.patch.dict(sys.modules, {"fla": None}), pytest.raises(EnvironmentProblem, match="flash-linear-attention"):
        delta_rule_by_fla(*activated(inputs(3)), sequences=Sequences((3,), (NO_PARENT,)))
