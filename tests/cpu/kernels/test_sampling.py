"""Draws of tokens beside their definition in Python's whole numbers and float64, for both widths of vectors."""

import math

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.kernels.sampling import draw
from tests.grids import each

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.usefixtures("needs_kernels"),
    pytest.mark.usefixtures("kernels"),
]
BITS = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mixed(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & BITS
    return z ^ (z >> 31)


def noise(seed: int, token: int) -> float:
    u = ((mixed(mixed(seed) + (token + 1) * GAMMA & BITS) >> 11) + 0.5) / 2**53
    return -math.log(-math.log(u))


def by_definition(logits: Tensor, seeds: Tensor) -> list[int]:
    rows = []
    for row, seed in zip(logits.double().tolist(), seeds.tolist(), strict=True):
        values = [x + noise(seed, i) for i, x in enumerate(row)]
        rows.append(max(range(len(row)), key=values.__getitem__))
    return rows


@each(vocabulary=(1, 7, 16, 17, 100, 1031, 4096), spread=(0.01, 1.0, 6.0))
def test_tokens_are_those_of_the_definition(vocabulary: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(20, vocabulary, generator=generator) * spread
    seeds = torch.randint(0, 2**31, (20,), generator=generator)
    tokens, log_probs, ranks = draw(logits, seeds)
    assert tokens.tolist() == by_definition(logits, seeds)
    right = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    assert (log_probs.double() - right).abs().max() <= 1e-6
    assert ranks.tolist() == (logits >= logits.gather(1, tokens[:, None])).sum(1).tolist()


def test_the_numbers_are_splitmix64s() -> None:
    """The first of the generator that begins at 1234567, as Rosetta Code prints them."""
    found = [mixed(1234567 + (i + 1) * GAMMA & BITS) for i in range(3)]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_what_is_drawn_has_the_softmaxs_frequencies() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, 1.5])
    count = 100_000
    tokens, _, _ = draw(logits.expand(count, 6).contiguous(), torch.arange(count))
    frequencies = tokens.bincount(minlength=6) / count
    expected = logits.softmax(0)
    assert ((frequencies - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt()).all()


def test_rows_of_a_larger_tensor_are_read_where_they_are() -> None:
    around = torch.full((6, 50), torch.nan)
    logits = around[:, 3:40]
    logits.copy_(torch.randn(6, 37, generator=torch.Generator().manual_seed(1)))
    seeds = torch.arange(6)
    for mine, alone in zip(draw(logits, seeds), draw(logits.contiguous(), seeds), strict=True):
        assert torch.equal(mine, alone)
    assert not draw(logits, seeds)[1].isnan().any()


def test_what_is_ruled_out_is_never_drawn() -> None:
    logits = torch.full((200, 70), -torch.inf)
    logits[:, 33], logits[:, 68] = 0.0, -3.0
    tokens, log_probs, _ = draw(logits, torch.arange(200))
    assert set(tokens.tolist()) == {33, 68}
    assert log_probs[tokens == 33].unique().tolist() == [pytest.approx(-math.log1p(math.exp(-3)), abs=1e-7)]


def test_a_row_without_numbers_gives_none() -> None:
    """Its log-prob says so: a token of it is not to be trusted."""
    logits = torch.tensor([[-torch.inf] * 20, [0.0] * 19 + [torch.nan]])
    tokens, log_probs, _ = draw(logits, torch.tensor([1, 2]))
    assert tokens[0] == 0 and 0 <= tokens[1] < 20
    assert log_probs.isnan().all()


def test_threads_change_nothing() -> None:
    logits, seeds = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)), torch.arange(40)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(draw(logits, seeds))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))
