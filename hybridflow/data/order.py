"""Which rows come next: a function of the seed and of how many were taken so far, and of nothing else.

order = PromptOrder(len(dataset), seed=0, shuffle=True)
order.next(64)
"""

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

MOST_TURNS = 1000  # rows after which the turns of several sources begin anew


class PromptOrder:
    """One permutation an epoch, each a function of (seed, epoch) alone.

    The only state is `position`, the number of rows handed out so far. The order from there on does not depend on
    how many were asked for at a time, so a run that is resumed with the position it had goes on exactly as it would.
    salt: tells the orders of several sources of one seed apart.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, *, position: int = 0, salt: str = "") -> None:
        assert num_prompts > 0, f"num_prompts = {num_prompts}: an order needs a prompt"
        assert position >= 0, f"position = {position} is negative"
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._salt = salt
        self.position = position

    def next(self, count: int) -> list[int]:
        """The next `count` indices; a call may cross into the next epoch, or over several."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, start = divmod(self.position, self._num_prompts)
            taken = self._permutation(epoch)[start : start + count - len(indices)].tolist()
            indices += taken
            self.position += len(taken)
        return indices

    def _permutation(self, epoch: int) -> Tensor:
        """(num_prompts,) drawn anew by each call: a million take some 20 milliseconds."""
        if not self._shuffle:
            return torch.arange(self._num_prompts)
        digest = hashlib.blake2b(f"prompt order {self._seed}{self._salt} {epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # below 2**63
        return torch.randperm(self._num_prompts, generator=generator)


class MixedOrder:
    """Rows of several sources by turns, each source in one order, which begins anew after the source's last row.

    The turns repeat: of every so many rows each source has a share, evenly spread. lengths: rows of each source,
    which lie one after the other. Resumes as PromptOrder does.
    """

    def __init__(
        self, lengths: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool, *, position: int = 0
    ) -> None:
        assert position >= 0, f"position = {position} is negative"
        self._lengths, self._seed, self._shuffle = tuple(lengths), seed, shuffle
        self._shares = shares(weights)
        self._turns = _turns(self._shares)
        self.position = position

    def next(self, count: int) -> list[int]:
        """The next `count` indices."""
        turns = [self._turns[place % len(self._turns)] for place in range(self.position, self.position + count)]
        taken = [iter(self._of_source(source, turns.count(source))) for source in range(len(self._lengths))]
        self.position += count
        return [next(taken[source]) for source in turns]

    def _of_source(self, source: int, count: int) -> list[int]:
        rounds, within = divmod(self.position, len(self._turns))
        before = rounds * self._shares[source] + self._turns[:within].count(source)
        salt = f" source {source}"
        order = PromptOrder(self._lengths[source], self._seed, self._shuffle, position=before, salt=salt)
        return [sum(self._lengths[:source]) + index for index in order.next(count)]


def rows_of_sources(weights: Sequence[float], num_rows: int) -> list[int]:
    """Of the first `num_rows` of a MixedOrder, how many each source has given."""
    own = shares(weights)
    rounds, within = divmod(num_rows, sum(own))
    begun = _turns(own)[:within]
    return [rounds * share + begun.count(source) for source, share in enumerate(own)]


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Rows of each source among as few as have these proportions, or among 1,000 where more would be needed.

    A source that would have none of 1,000 has a 0.
    """
    fractions = [Fraction(weight).limit_denominator(1000) for weight in weights]
    whole = math.lcm(*(fraction.denominator for fraction in fractions))
    exact = [int(fraction * whole) for fraction in fractions]
    exact = [count // math.gcd(*exact) for count in exact] if all(exact) else exact
    if all(exact) and sum(exact) <= MOST_TURNS:
        return tuple(exact)
    parts = [MOST_TURNS * weight / sum(weights) for weight in weights]
    rest = MOST_TURNS - sum(int(part) for part in parts)
    largest = sorted(range(len(parts)), key=lambda i: (int(parts[i]) - parts[i], i))[:rest]
    return tuple(int(part) + (i in largest) for i, part in enumerate(parts))


def _turns(counts: Sequence[int]) -> list[int]:
    """The source of each place: those of one source lie as far from each other as they can."""
    places = [((i + 0.5) / count, source) for source, count in enumerate(counts) for i in range(count)]
    return [source for _, source in sorted(places)]
