"""Ranks of a run that hold and do the same, whatever the roles choose, as one cell. Pure."""

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np
import numpy.typing as npt

from hybridflow.automap.placements import Placement
from hybridflow.parallel.ranks import Ranks

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]


class RankClasses:
    """The ranks of a run, those together that no pipeline stage of any option tells apart."""

    def __init__(self, placement: Placement, stages: Mapping[str, set[int]]) -> None:
        """stages: of each role, the numbers of pipeline stages that it may have."""
        size = 0
        for name, ranks in placement.items():
            bounds = {ranks[0], ranks[-1] + 1} if contiguous(ranks) else set(ranks)
            for bound in bounds:
                size = gcd(size, bound)
            for pp in stages.get(name, ()):
                size = gcd(size, len(ranks) // pp)
        all_contiguous = all(contiguous(ranks) for ranks in placement.values())
        self.size = max(1, size) if all_contiguous else 1
        last = max(ranks[-1] for ranks in placement.values())
        self.count = (last + 1) // self.size
        self._first = {name: [rank for rank in ranks if rank % self.size == 0] for name, ranks in placement.items()}
        self._ranks = placement

    def ends(self, ranks: Ranks) -> tuple[int, int]:
        """The first cell and the last of some ranks: the first stage of a pipeline holds most, or the last."""
        return ranks[0] // self.size, ranks[-1] // self.size

    def spread(self, name: str, of_stages: Sequence[float]) -> Float | Int:
        """By cell: the value of the stage that lies there, 0 where the role does not."""
        found = np.zeros(self.count, dtype=np.asarray(of_stages).dtype)
        ranks = self._ranks[name]
        cells = [rank // self.size for rank in self._first[name]]
        stages = np.arange(len(cells)) * self.size * len(of_stages) // len(ranks)
        found[cells] = np.asarray(of_stages)[stages]
        return found


def within(ranks: Ranks, others: Ranks) -> bool:
    if ranks is others or ranks[0] < others[0] or ranks[-1] > others[-1]:
        return ranks is others
    return contiguous(others) or set(ranks) <= set(others)


def contiguous(ranks: Sequence[int]) -> bool:
    return ranks[-1] - ranks[0] + 1 == len(ranks)
