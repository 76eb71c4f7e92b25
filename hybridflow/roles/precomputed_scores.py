"""Scores of a part of a rollout, computed before the rest was generated, in units of rows that a model runs together.

The last bits of a matrix product's row may depend on the rows beside. So what is run together is fixed
before a token is generated, by the prompts alone, and results depend neither on who was waiting nor for how long:

    units = cut_in_units(prompts_of_replicas, samples, costs, per_replica=4, num_shares=2)
    role.ahead = PrecomputedScores(units)                       # while the rollout is made
    role.ahead.keep(unit, contribution)             # by a replica that waits, of rows that it has generated
    role.ahead.assign_rest(rollout, owners, dp, tokens)  # the rollout is whole: what is left is dealt out
    role.log_probs(rollout)                         # runs this replica's share of it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, balanced_partition
from hybridflow.models.prompt_groups import prompt_groups
from hybridflow.parallel.exchange import PartialTensor

NOBODY = -1
UNEVEN = 1.15


@dataclass(frozen=True)
class ScoringUnits:
    """rows[u]: those of unit u, ascending; replicas[u]: the engine replica that generates them all."""

    rows: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def of_replica(self, replica: int) -> list[int]:
        return [unit for unit, own in enumerate(self.replicas) if own == replica]

    def without(self, rows: Sequence[int]) -> "ScoringUnits":
        """As many units, less these rows; some may have none left."""
        left_out = set(rows)
        return ScoringUnits(
            tuple(tuple(row for row in unit if row not in left_out) for unit in self.rows), self.replicas
        )


def cut_in_units(
    prompts_of_replicas: Sequence[Sequence[int]],
    samples: Sequence[int],
    costs: Sequence[int],
    *,
    per_replica: int,
    num_shares: int,
) -> ScoringUnits:
    """Each replica's prompts in `per_replica` units of nearly equal cost, or one a prompt where there are fewer.

    samples, costs: of each prompt, the number of rows and the expected cost. The rows of a prompt, which a
    model runs once for all of them, stay together unless that leaves `num_shares` data-parallel replicas unlike work.
    """
    first = [0, *accumulate(samples)]
    num_pieces = _pieces_of_a_prompt(len(samples), num_shares, most=max(samples, default=1))
    rows: list[tuple[int, ...]] = []
    replicas: list[int] = []
    for replica, prompts in enumerate(prompts_of_replicas):
        pieces = [(p, piece) for p in prompts for piece in _cut(first[p], first[p + 1], num_pieces)]
        shares = [costs[p] * len(piece) // samples[p] for p, piece in pieces]
        for part in balanced_partition(shares, min(per_replica, len(pieces))):
            rows.append(tuple(row for i in part for row in pieces[i][1]))
            replicas.append(replica)
    return ScoringUnits(tuple(rows), tuple(replicas))


def _pieces_of_a_prompt(num_prompts: int, num_shares: int, *, most: int) -> int:
    """The fewest with which the busiest of so many shares of alike prompts has at most UNEVEN of the mean."""
    for pieces in range(1, most):
        if ceil(num_prompts * pieces / num_shares) * num_shares <= UNEVEN * num_prompts * pieces:
            return pieces
    return most


def _cut(start: int, end: int, num_pieces: int) -> list[range]:
    """The rows from start to end in so many pieces, or one a row where there are fewer."""
    num_pieces = min(num_pieces, end - start)
    bounds = [start + (end - start) * i // num_pieces for i in range(num_pieces + 1)]
    return [range(one, other) for one, other in pairwise(bounds)]


class PrecomputedScores:
    """Scores that a model computed of a rollout before it was whole, and who computes the rest.

    known: by unit, as far as this rank contributes the scores, with the places within the unit.
    """

    def __init__(self, units: ScoringUnits) -> None:
        self.units = units
        self.known: dict[int, PartialTensor] = {}
        self._rollout: RolloutBatch | None = None
        self._left: list[list[int]] = []

    def keep(self, unit: int, contribution: PartialTensor) -> None:
        """Store the scores of a unit on this rank, which contributes them to the whole."""
        self.known[unit] = contribution

    def assign_rest(self, rollout: RolloutBatch, owners: Sequence[int], dp: int, tokens: Sequence[int]) -> None:
        """Decide who computes the units that nobody has computed: the rollout is whole.

        owners: by unit the data-parallel rank that has computed it, or NOBODY; tokens: by unit, see `tokens_of_units`.
        """
        left = [unit for unit, owner in enumerate(owners) if owner == NOBODY]
        parts = balanced_partition([tokens[unit] for unit in left], dp)
        self._left = [[left[i] for i in part] for part in parts]
        self._rollout = rollout

    def covers(self, batch: RolloutBatch, some: Tensor | None = None) -> bool:
        """Whether the scores are of this batch object, once it is whole, and of exactly these rows (None: all rows)."""
        if self._rollout is not batch:
            return False
        wanted = range(len(batch)) if some is None else some.sort().values.tolist()
        return sorted(row for rows in self.units.rows for row in rows) == list(wanted)

    def own_results(self) -> list[tuple[Tensor, PartialTensor]]:
        """(rows of the unit, scores) of each unit that this rank has kept."""
        return [(torch.tensor(self.units.rows[unit], dtype=torch.int64), kept) for unit, kept in self.known.items()]

    def rows_left(self, dp_rank: int) -> list[list[int]]:
        """The rows of each unit that this replica has still to run."""
        return [list(self.units.rows[unit]) for unit in self._left[dp_rank]]


def tokens_of_units(rollout: RolloutBatch, units: ScoringUnits) -> list[int]:
    """Tokens that a model runs for each unit."""
    lengths = rollout.lengths.tolist()
    return [sum(group.tokens(lengths) for group in prompt_groups(rollout, rows)) for rows in units.rows]
