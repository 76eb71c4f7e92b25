"""The kernel in C against a softmax written out in float64, forward and backward, for both widths of vectors."""

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.attention import attend, items_of
from hybridflow.models.attention import PackedSequences
from hybridflow.models.shared_prompt import SharedPrompts
from tests.grids import each

CPU = torch.device("cpu")
SCALE = 0.3
Groups = list[tuple[int, tuple[int, ...]]]  # prompts and what follows each

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("needs_kernels")]

# sequences by themselves, groups, sequences behind; 32 queries are computed at a time, 16 or 8 are a vector
CASES: dict[str, tuple[tuple[int, ...], Groups, tuple[int, ...]]] = {
    "one token": ((1,), [], ()),
    "few": ((5, 3), [], ()),
    "around a vector": ((17, 16, 15, 9, 8, 7), [], ()),
    "around a block": ((33, 32, 31), [], ()),
    "long": ((192, 130), [], ()),
    "one group": ((), [(5, (3, 2))], ()),
    "ragged groups": ((), [(70, (130, 65, 3)), (1, (2, 2)), (33, (16, 1))], ()),
    "with others and padding": ((7, 40), [(32, (32, 8)), (3, (1, 1, 1))], (5,)),
}
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 1e-2}  # relative to the largest value; scores are as large as 15


def packed_of(case: str) -> PackedSequences:
    before, groups, after = CASES[case]
    lengths = (*before, *(prompt for prompt, _ in groups), *(x for _, rest in groups for x in rest), *after)
    return PackedSequences.from_lengths(
        lengths, CPU, SharedPrompts.from_lengths(groups, start=sum(before), device=CPU) if groups else None
    )


def seen_by(case: str) -> Iterator[tuple[slice, slice]]:
    """Each stretch, and the prompt that it follows, empty where it follows none."""
    before, groups, after = CASES[case]
    at = 0

    def stretch(length: int) -> slice:
        nonlocal at
        at += length
        return slice(at - length, at)

    yield from ((stretch(length), slice(0, 0)) for length in before)
    prompts = [stretch(prompt) for prompt, _ in groups]
    yield from ((prompt, slice(0, 0)) for prompt in prompts)
    for prompt, (_, rest) in zip(prompts, groups, strict=True):
        yield from ((stretch(length), prompt) for length in rest)
    yield from ((stretch(length), slice(0, 0)) for length in after)


def written_out(case: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    outputs = []
    for own, prompt in seen_by(case):
        k, v = (torch.cat([x[prompt], x[own]]) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[own], k) * SCALE
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - scores.shape[1] + 1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


def inputs(case: str, heads: int, kv_heads: int, dims: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value as views of one tensor, as a layer has them."""
    count = sum(packed_of(case).lengths)
    made = torch.randn(count, heads + 2 * kv_heads, dims, generator=torch.Generator().manual_seed(dims + heads))
    return list(made.to(dtype).split([heads, kv_heads, kv_heads], 1))


def outputs_and_gradients(function, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype))]


def ours(case: str):
    return functools.partial(attend, packed=packed_of(case), scale=SCALE)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
@each(shape=((2, 2, 16), (6, 2, 24), (3, 1, 80), (4, 4, 128), (2, 1, 5)))
def test_equals_a_softmax_written_out(case: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Outputs, and gradients of queries, keys and values."""
    tensors = inputs(case, *shape, dtype)  # heads, kv_heads, head_dim
    mine = outputs_and_gradients(ours(case), tensors)
    expected = outputs_and_gradients(functools.partial(written_out, case), [x.double() for x in tensors])
    scale = float(expected[0].abs().max())  # of one token the gradients of query and key are zero
    for own, right in zip(mine, expected, strict=True):
        assert own.dtype == dtype
        assert (own.double() - right).abs().max() <= TOLERANCES[dtype] * max(float(right.abs().max()), scale)


@pytest.mark.usefixtures("kernels")
def test_two_tokens_by_hand() -> None:
    """The second token weighs 10 and 20 with softmax(0, log 3) = (1/4, 3/4); of its output 1, d value = the weights,
    and d score = weight (value - 17.5) = (-1.875, 1.875)."""
    query = torch.tensor([7.0, 1.0]).view(2, 1, 1).requires_grad_()
    key = torch.tensor([0.0, 1.0986122886681098]).view(2, 1, 1).requires_grad_()
    value = torch.tensor([10.0, 20.0]).view(2, 1, 1).requires_grad_()
    out = attend(query, key, value, packed=PackedSequences.from_lengths((2,), CPU), scale=1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([10.0, 17.5]))
    of_query, of_key, of_value = torch.autograd.grad(out[1].sum(), (query, key, value))
    torch.testing.assert_close(of_value.flatten(), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(of_key.flatten(), torch.tensor([-1.875, 1.875]))
    torch.testing.assert_close(of_query.flatten(), torch.tensor([0.0, 1.875 * 1.0986122886681098]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [1e-30, 30.0, 1e4])
def test_scores_of_any_size(size: float) -> None:
    """Of 1e4 the scores reach 1e8: all weight is on one key, and nothing overflows."""
    tensors = inputs("around a block", 2, 2, 16, torch.float32)
    tensors[0] = tensors[0] * size
    mine, expected = (
        outputs_and_gradients(function, [x.to(dtype) for x in tensors])
        for function, dtype in (
            (ours("around a block"), torch.float32),
            (functools.partial(written_out, "around a block"), torch.float64),
        )
    )
    assert all(x.isfinite().all() for x in mine)
    assert (mine[0].double() - expected[0]).abs().max() <= 1e-5 * max(1.0, size / 30) * expected[0].abs().max()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_reaches_those_who_see_it_and_no_other(bad: float, dtype: torch.dtype) -> None:
    case = "with others and padding"  # rows of 7 and 40; prompts at 47 and 79; responses from 82 on: 32, 8, 1, 1, 1; 5
    tensors = [x.clone() for x in inputs(case, 2, 2, 16, dtype)]
    tensors[1][50] = bad  # the fourth key of the first prompt
    out = ours(case)(*tensors)
    reached = out.isnan().any(-1).any(-1).nonzero()[:, 0].tolist()
    if bad is torch.inf:  # a score of +inf or -inf
        assert set(reached) <= {*range(50, 79), *range(82, 122)} and reached
    else:
        assert reached == [*range(50, 79), *range(82, 122)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_stretch_reaches_no_other_but_through_its_prompt(dtype: torch.dtype) -> None:
    case = "ragged groups"  # prompts at 0, 70, 71; responses from 104 on: 130, 65, 3, 2, 2, 16, 1
    tensors = [x.clone() for x in inputs(case, 4, 2, 24, dtype)]
    before = ours(case)(*tensors)
    for x in tensors[1:]:
        x[234:299] += 1.0  # the second response of the first prompt
        x[70] += 1.0  # the second prompt
    changed = (ours(case)(*tensors) != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == [70, *range(234, 299), *range(302, 306)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    tensors, threads = inputs("ragged groups", 6, 2, 24, dtype), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3, 8):
            torch.set_num_threads(count)
            found.append(outputs_and_gradients(ours("ragged groups"), tensors))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_sequence_has_the_same_results_whatever_is_packed_beside_it() -> None:
    tensors = inputs("long", 4, 2, 24, torch.float32)
    together = ours("long")(*tensors)
    alone = attend(*(x[192:] for x in tensors), packed=PackedSequences.from_lengths((130,), CPU), scale=SCALE)
    assert torch.equal(together[192:], alone)


def test_tensors_that_do_not_lie_by_rows() -> None:
    tensors = inputs("long", 2, 2, 16, torch.float32)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in tensors]
    assert turned[0].stride(-1) != 1
    assert torch.equal(ours("long")(*turned), ours("long")(*tensors))


def test_items_by_hand() -> None:
    """Two rows of 4 and 2; a prompt of 5 with responses of 2 and 1, one of 3 with one of 6; padding of 8."""
    shared = SharedPrompts.from_lengths([(5, (2, 1)), (3, (6,))], start=6, device=CPU)
    items = items_of((4, 2, 5, 3, 2, 1, 6, 8), shared)
    rows = [(0, 4, 0), (4, 2, 0), (23, 8, 0), (6, 5, 0), (14, 2, 5), (16, 1, 7), (11, 3, 0), (17, 6, 3)]
    assert [tuple(row) for row in items.stretches.tolist()] == rows
    expected = [(0, 1, 0, 4), (1, 1, 0, 2), (2, 1, 0, 8), (3, 3, 1, 8), (6, 2, 1, 9)]
    assert [tuple(row) for row in items.items.tolist()] == expected
