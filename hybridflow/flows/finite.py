"""Numbers that are not finite are found before they reach the weights, and said to be where they are."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch


class NonFinite(Exception):
    """A NaN or an infinity, known to every rank alike. `tensors`: what was at hand, for a dump."""

    def __init__(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(what)
        self.tensors = dict(tensors)


def check_finite(known: Mapping[str, Tensor], rollout: RolloutBatch) -> None:
    """Raise NonFinite for the first of some (T,) or (N,) tensors that are not finite everywhere.

    One of (N + M,) is of the rollout's rows and then of those of a second rollout to the same prompts.
    """
    for name, values in known.items():
        if values.sum().isfinite():  # no sum with a NaN or an infinity is; one of finite numbers may overflow
            continue
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            row = int(_rows_of(torch.tensor([at]), rollout)) if len(values) == len(rollout.input_ids) else at
            where = f"row {row - len(rollout)} of the second rollout"
            if row < len(rollout):
                where = described(row, rollout)
            raise NonFinite(f"{name} is {float(values[at])} in {where}", {**rollout.tensors(), **known})


def _rows_of(tokens: Tensor, batch: RolloutBatch) -> Tensor:
    return torch.searchsorted(batch.lengths.cumsum(0), tokens, right=True)


def described(row: int, batch: RolloutBatch) -> str:
    return f"row {row} (a response to prompt {int(batch.prompt_indices[row])} of the iteration)"
