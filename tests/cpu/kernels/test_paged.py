"""Attention over a cache in blocks, in C, against a softmax written out in float64, for both widths of vectors."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.kernels.paged import attend, store
from tests.grids import each

BLOCK = 32
SCALE = 0.3

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("needs_kernels")]

# of each sequence: tokens that are in the cache already, and those that come, all of which are queries
CASES: dict[str, list[tuple[int, int]]] = {
    "a first token": [(0, 1)],
    "prompts": [(0, 5), (0, 70), (0, 32), (0, 33)],
    "next tokens": [(1, 1), (15, 1), (16, 1), (31, 1), (32, 1), (63, 1), (100, 1)],
    "prompts behind a prefix": [(32, 7), (64, 40)],
    "all together": [(40, 1), (0, 45), (64, 9), (7, 1)],
    "samples of a prompt": [(64 + 5 * i, 1) for i in range(14)],
    "samples of prompts": [(95, 1), (63, 1), (70, 1), (40, 1), (41, 1), (33, 20), (64, 1), (64, 3), (99, 1)],
    "two prompts of one system prompt": [(96 + i, 1) for i in range(5)],
}
# sequences whose first blocks are those of another: which, and how many
SHARED: dict[str, dict[int, tuple[int, int]]] = {
    "samples of a prompt": {i: (0, 2) for i in range(1, 14)},  # more than are computed at once
    "samples of prompts": {1: (0, 1), 2: (0, 2), 4: (3, 1), 5: (3, 1), 7: (6, 2), 8: (6, 2)},
    "two prompts of one system prompt": {1: (0, 3), 2: (0, 1), 3: (2, 3), 4: (2, 3)},
}
SHAPES = [(2, 2, 16), (6, 2, 32), (7, 1, 80), (4, 4, 64), (8, 1, 128)]  # heads, kv_heads, head_dim
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 1e-2}  # relative to the largest value


@dataclass
class Step:
    """Of an engine: a cache with what came before, and the tokens that come, as a layer has them."""

    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor
    slots: Tensor
    keys: list[Tensor]  # of each sequence, all of its tokens
    values: list[Tensor]

    def run(self) -> Tensor:
        store(self.key, self.value, self.cache, self.slots)
        out = torch.full(self.query.shape, torch.nan, dtype=self.query.dtype)
        longest = int(self.lengths.max())
        attend(
            self.query,
            self.cache,
            out,
            table=self.table,
            starts=self.starts,
            lengths=self.lengths,
            longest=longest,
            scale=SCALE,
        )
        return out

    def written_out(self) -> Tensor:
        outputs = []
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            query = self.query[self.starts[i] : self.starts[i + 1]].double()
            k, v = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query, k) * SCALE
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(query) + 1)
            outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
        return torch.cat(outputs)


def step_of(case: str, heads: int, kv_heads: int, dims: int, dtype: torch.dtype) -> Step:
    """Blocks lie anywhere in the cache, which is full of NaN where nobody has written; a token of padding follows."""
    generator = torch.Generator().manual_seed(dims + heads)
    sizes = CASES[case]
    counts = [-(-(before + new) // BLOCK) for before, new in sizes]
    order = torch.randperm(sum(counts) + 3, generator=generator).int()
    table = torch.full((len(sizes), max(counts) + 2), -1, dtype=torch.int32)
    cache = torch.full((len(order), kv_heads, BLOCK, 2 * dims), torch.nan, dtype=dtype)
    keys, values, queries, slots = [], [], [], []
    for i, ((before, new), blocks) in enumerate(zip(sizes, order.split([*counts, 3]), strict=False)):
        made = torch.randn(before + new, heads + 2 * kv_heads, dims, generator=generator).to(dtype)
        of, shared = SHARED.get(case, {}).get(i, (i, 0))
        if shared:
            blocks[:shared] = table[of, :shared]
            made[: BLOCK * shared, heads:] = torch.cat([keys[of], values[of]], 1)[: BLOCK * shared]
        table[i, : len(blocks)] = blocks
        query, key, value = made.split([heads, kv_heads, kv_heads], 1)
        at = torch.arange(before + new)
        where = blocks[at // BLOCK].long() * BLOCK + at % BLOCK
        store(key[:before], value[:before], cache, where[:before])
        slots.append(where[before:])
        queries.append(made[before:])
        keys.append(key)
        values.append(value)
        assert query.shape[1] == heads
    nothing = torch.randn(1, heads + 2 * kv_heads, dims, generator=generator).to(dtype)
    query, key, value = torch.cat([*queries, nothing]).split([heads, kv_heads, kv_heads], 1)
    news = torch.tensor([0] + [new for _, new in sizes])
    return Step(
        query[:-1],
        key,
        value,
        cache,
        table,
        news.cumsum(0).int(),
        torch.tensor([before + new for before, new in sizes], dtype=torch.int32),
        torch.cat([*slots, torch.tensor([-1])]),
        keys,
        values,
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
@each(shape=SHAPES)
def test_equals_a_softmax_written_out(case: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    step = step_of(case, *shape, dtype)
    mine, expected = step.run(), step.written_out()
    assert mine.dtype == dtype
    assert (mine.double() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("threads", [3, 8])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype, threads: int) -> None:
    alone = step_of("all together", 6, 2, 32, dtype).run()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(step_of("all together", 6, 2, 32, dtype).run(), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", ["next tokens", *SHARED])
@each(shape=SHAPES)
def test_a_token_is_the_same_bits_whatever_shares_its_step(
    case: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Another sequence beside, samples of its own prompt, and other blocks: replicas draw the same tokens."""
    together = step_of(case, *shape, dtype)
    outputs = together.run()
    for i, length in enumerate(together.lengths):
        tokens = slice(int(together.starts[i]), int(together.starts[i + 1]))
        alone = torch.full_like(outputs[tokens], torch.nan)
        attend(
            together.query[tokens],
            together.cache,
            alone,
            table=together.table[i : i + 1],
            starts=together.starts[i : i + 2] - together.starts[i],
            lengths=together.lengths[i : i + 1],
            longest=int(length),
            scale=SCALE,
        )
        assert torch.equal(alone, outputs[tokens])


@pytest.mark.usefixtures("kernels")
def test_a_sample_with_a_block_of_its_own_reads_that_one() -> None:
    """Its second block holds other values than that of the samples beside it; its first is theirs."""
    step = step_of("samples of a prompt", 4, 4, 64, torch.float32)
    shared = step.run()
    other = 2 * step.cache[step.table[1, 1]].flip(1)  # a head's keys and values, in another order
    step.cache, step.table[1, 1] = torch.cat([step.cache, other[None]]), len(step.cache)
    step.keys[1], step.values[1] = step.keys[1].clone(), step.values[1].clone()
    keys, values = other.reshape(4, 2, BLOCK, 64).permute(1, 2, 0, 3)
    step.keys[1][BLOCK : 2 * BLOCK], step.values[1][BLOCK : 2 * BLOCK] = keys, values
    found = step.run()
    expected = step.written_out()
    assert (found.double() - expected).abs().max() <= 4e-6 * expected.abs().max()
    assert not torch.allclose(found[1], shared[1], atol=1e-2)
    rest = [i for i in range(14) if i != 1]
    assert torch.equal(found[rest], shared[rest])


@pytest.mark.usefixtures("kernels")
def test_two_tokens_by_hand() -> None:
    """The second token weighs values 10 and 20 with softmax(0, log 3) = (1/4, 3/4)."""
    key = torch.zeros(2, 1, 16)
    key[1, 0, 3] = 1.0986122886681098
    value = torch.tensor([10.0, 20.0]).view(2, 1, 1).expand(2, 1, 16).contiguous()
    query, out = torch.zeros(1, 1, 16), torch.empty(1, 1, 16)
    query[0, 0, 3] = 2.0
    cache = torch.zeros(3, 1, BLOCK, 32)
    store(key, value, cache, torch.tensor([2 * BLOCK, 2 * BLOCK + 1]))
    assert cache[:2].count_nonzero() == 0
    assert cache[2].flatten()[BLOCK * 16 : BLOCK * 16 + 32].tolist() == [10.0] * 16 + [20.0] * 16
    attend(
        query,
        cache,
        out,
        table=torch.tensor([[2]], dtype=torch.int32),
        starts=torch.tensor([0, 1], dtype=torch.int32),
        lengths=torch.tensor([2], dtype=torch.int32),
        longest=2,
        scale=0.5,
    )
    assert out.flatten().tolist() == pytest.approx([17.5] * 16, rel=1e-6)
