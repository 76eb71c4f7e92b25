"""Numbers that are not finite are found before they reach the weights, and said to be where they are."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.parallel.exchange import Exchange
from hybridflow.roles.base import TrainedRole


class NonFinite(Exception):
    """A NaN or an infinity, known to every rank alike. `tensors`: what was at hand, for a dump."""

    def __init__(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(what)
        self.tensors = dict(tensors)


def check_finite(known: Mapping[str, Tensor], rollout: RolloutBatch) -> None:
    """Raise NonFinite for the first of some (T,) or (N,) tensors that are not finite everywhere."""
    for name, values in known.items():
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            row = at if len(values) == len(rollout) else int(_rows_of(torch.tensor([at]), rollout))
            raise NonFinite(f"{name} is {float(values[at])} in {_described(row, rollout)}", {**vars(rollout), **known})


def check_steps(
    role: TrainedRole,
    numbers: Sequence[int],
    results: Tensor,
    rows: Sequence[Tensor],
    *,
    batch: RolloutBatch,
    exchange: Exchange,
) -> None:
    """Raise NonFinite where a step of `role` was not taken. Collective if so.

    numbers: of the steps. results: (steps, names), the sums over all ranks. rows: of the batch in each step of the
    iteration, as far as they are known.
    """
    bad = (~results.isfinite()).any(1).nonzero()
    if not len(bad):
        return
    at = int(bad[0])
    number = numbers[at]
    values = dict(zip(role.steps[number].names, results[at].tolist(), strict=True))
    row = _first_row(role.steps[number].row, exchange)
    where = "the gradient alone, every loss is finite"
    if row is not None and number < len(rows):
        where = f"the loss of {_described(int(rows[number][row]), batch)}"
    elif row is not None:
        where = f"the loss of row {row} of the mini-batch"
    raise NonFinite(
        f"{role.name}, step {number + 1} of the iteration: loss {values['loss']}, gradient norm {values['grad_norm']}; "
        f"first in {where}",
        vars(batch),
    )


def _first_row(own: int | None, exchange: Exchange) -> int | None:
    """The first row that any rank has found, if one has: the largest of negative numbers."""
    found = -torch.inf if own is None or own < 0 else -float(own)
    largest = float(exchange.maximum(torch.tensor(found, dtype=torch.float64, device=exchange.device)))
    return None if largest == -torch.inf else int(-largest)


def _rows_of(tokens: Tensor, batch: RolloutBatch) -> Tensor:
    return torch.searchsorted(batch.lengths.cumsum(0), tokens, right=True)


def _described(row: int, batch: RolloutBatch) -> str:
    return f"row {row} (a response to prompt {int(batch.prompt_indices[row])} of the iteration)"
