"""Attention with prompts that several responses share, against every response with its own copy of its prompt."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hybridflow.models import layer_classes
from hybridflow.models.attention import PackedSequences, attention_by_length
from hybridflow.models.layer_classes import attention_functions
from hybridflow.models.shared_prompt import (
    AttentionSpans,
    SharedPrompts,
    attention_with_copies,
    merge,
    varlen_backward,
    varlen_forward,
)

pytestmark = pytest.mark.compiles

CPU = torch.device("cpu")
SCALE = 0.3
Groups = list[tuple[int, tuple[int, ...]]]  # prompts and what follows each

# lengths of rows by themselves, groups, and the padding behind
CASES: dict[str, tuple[tuple[int, ...], Groups, int]] = {
    "one group": ((), [(5, (3, 2))], 0),
    "equal lengths": ((), [(6, (4, 4, 4)), (6, (4, 4, 4))], 0),
    "ragged": ((), [(7, (5, 3, 1)), (2, (6, 1)), (2, (4, 3)), (1, (2, 2))], 0),
    "with others and padding": ((6, 3, 3), [(5, (4, 1)), (3, (1, 1, 1))], 3),
    "long": ((), [(70, (130, 65, 3))], 0),  # beyond one block of the kernel
}
every_case = pytest.mark.parametrize("case", CASES)


def packed_of(case: str) -> PackedSequences:
    alone, groups, padding = CASES[case]
    lengths = (*alone, *(prompt for prompt, _ in groups), *(x for _, responses in groups for x in responses))
    shared = SharedPrompts.from_lengths(groups, start=sum(alone), device=CPU)
    return PackedSequences.from_lengths((*lengths, *([padding] if padding else [])), CPU, shared)


def leaves(case: str, *, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    count = sum(packed_of(case).lengths)
    generator = torch.Generator().manual_seed(count + heads)
    made = [torch.randn(count, n, 8, generator=generator, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    return [x.to(dtype).requires_grad_() for x in made]


def whole_rows(case: str) -> Iterator[tuple[Tensor, int]]:
    """(tokens of a row, a prompt's among them; how many of them are the prompt's), whole rows and padding last."""
    alone, groups, padding = CASES[case]
    at = sum(alone)
    ranges = torch.arange(sum(packed_of(case).lengths))
    rest = at + sum(prompt for prompt, _ in groups)
    for prompt, responses in groups:
        for length in responses:
            yield torch.cat([ranges[at : at + prompt], ranges[rest : rest + length]]), prompt
            rest += length
        at += prompt
    for row in (*ranges[: sum(alone)].split(list(alone)), ranges[rest : rest + padding]):
        if len(row):
            yield row, 0


def with_copies(case: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax written out, row by row. What a prompt's tokens see is the same in every row."""
    out = torch.zeros_like(query)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    for row, _ in whole_rows(case):
        scores = torch.einsum("qhd,khd->hqk", query[row], key[row]) * SCALE
        hidden = torch.ones(len(row), len(row), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = out.index_put((row,), torch.einsum("hqk,khd->qhd", weights, value[row]))
    return out


def outputs_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = function(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs)]


def merged(case: str) -> Callable[..., Tensor]:
    attend = attention_functions(torch.float32).attend
    return lambda q, k, v: attend(q, k, v, packed=packed_of(case), scale=SCALE)


IN_C = "in C"
KERNELS = (IN_C, "torch")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(kernel, dtype) for kernel in KERNELS for dtype in TOLERANCES if (kernel, dtype) != (IN_C, torch.float64)],
    indirect=["kernel"],
    ids=str,
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (3, 1)])
@every_case
def test_equals_a_copy_of_the_prompt_for_each_response(
    case: str, heads: int, kv_heads: int, kernel: None, dtype: torch.dtype
) -> None:
    """Outputs, and gradients of queries, keys and values; errors relative to the largest value."""
    inputs = leaves(case, heads=heads, kv_heads=kv_heads, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = outputs_and_gradients(lambda *qkv: with_copies(case, *qkv), exact)
    for mine, right in zip(outputs_and_gradients(merged(case), inputs), expected, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - right).abs().max() <= TOLERANCES[dtype] * right.abs().max()


@every_case
def test_the_fallback_equals_it_too(case: str) -> None:
    """The one for float32 on CUDA, where the kernel gives no log-sum-exp."""
    packed, inputs = packed_of(case), leaves(case, heads=4, kv_heads=2, dtype=torch.float64)

    def fallback(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert packed.shared is not None
        return attention_with_copies(q, k, v, own=packed.own, shared=packed.shared, scale=SCALE)

    expected = outputs_and_gradients(lambda *qkv: with_copies(case, *qkv), inputs)
    for mine, right in zip(outputs_and_gradients(fallback, inputs), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("changed", ["prompt", "response"])
def test_a_group_does_not_reach_another(changed: str) -> None:
    """Nor a response its neighbour: only the prompt reaches all that follow it."""
    case = "ragged"  # prompts at 0, 7, 9, 11; responses from 12 on: 5, 3, 1, 6, 1, 4, 3, 2, 2
    q, k, v = (x.detach() for x in leaves(case, heads=4, kv_heads=2, dtype=torch.float32))
    before = merged(case)(q, k, v)
    own = slice(7, 9) if changed == "prompt" else slice(21, 27)
    k[own] += 1.0
    reached = (merged(case)(q, k, v) != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    if changed == "prompt":  # its first token sees one key alone
        assert set(reached) <= {*range(7, 9), *range(21, 28)} and {8, *range(21, 28)} <= set(reached)
    else:
        assert reached == list(range(21, 27))


def test_a_merge_by_hand() -> None:
    """Sums of exponentials 1 and 3: a quarter of the first output and three quarters of the second."""
    out, lse = torch.tensor([[[8.0]]]), torch.tensor([[1.0]]).log()
    merge(out, lse, torch.tensor([[[4.0]]]), torch.tensor([[3.0]]).log())
    torch.testing.assert_close(out, torch.tensor([[[5.0]]]))
    torch.testing.assert_close(lse, torch.tensor([[4.0]]).log())


def test_where_nothing_is_shared_torchs_kernel_is_called_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_classes, "library", lambda: None)
    packed = PackedSequences.from_lengths((5, 3, 3), CPU)
    q, k, v = (torch.randn(11, 2, 8, generator=torch.Generator().manual_seed(i)).double() for i in range(3))
    expected = attention_by_length(q, k, v, packed=packed, scale=SCALE)
    attend = attention_functions(torch.float64).attend
    assert torch.equal(attend(q, k, v, packed=packed, scale=SCALE), expected)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no compiler, torch's is called twice and merged."""
    if request.param != IN_C:
        monkeypatch.setattr(layer_classes, "library", lambda: None)
    else:
        request.getfixturevalue("needs_kernels")


def test_shared_prompts_by_hand() -> None:
    shared = SharedPrompts.from_lengths([(5, (4, 1)), (3, (2, 2, 2))], start=9, device=CPU)
    assert (shared.prompts, shared.responses) == (slice(9, 17), slice(17, 28))
    assert shared.spans.queries == (5, 6) and shared.spans.keys == (5, 3) and not shared.spans.causal
    assert shared.spans.query_bounds.tolist() == [0, 5, 11] and shared.spans.key_bounds.tolist() == [0, 5, 8]
    assert shared.spans.runs() == [(1, 5, 5), (1, 6, 3)]


@pytest.mark.parametrize("causal", [True, False])
def test_torchs_variable_length_operators_take_what_they_are_given(causal: bool) -> None:
    """Names, order and shapes by torch's own descriptions of them: the kernel itself is on CUDA alone."""
    query, key = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((9, 4, 8), (5, 2, 8)))
    where = torch.zeros(3, dtype=torch.int32, device="meta")
    spans = AttentionSpans((6, 3), (3, 2), where, where, causal)
    out, lse = varlen_forward(query, key, key, spans, SCALE)
    assert out.shape == (9, 4, 8) and lse.shape == (9, 4)
    gradients = varlen_backward(out, query, key, key, out, lse, spans, SCALE)
    assert [x.shape for x in gradients] == [query.shape, key.shape, key.shape]
