"""What ranks know parts of, made whole in one exchange."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.flows.step_metrics import check_finite
from hybridflow.parallel.agreement import raise_on_all_ranks
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.rewards.scorer import Scores


class Pending(Protocol):
    """A tensor of which this rank knows parts."""

    def parts(self) -> tuple[PartialTensor, ...]: ...

    def put_together(self, wholes: Sequence[Tensor]) -> Tensor:
        """The tensor, made of whole parts."""


class Known:
    """Whole tensors by the names that `Run.whole` was given them under."""

    def __init__(self, **tensors: Tensor) -> None:
        vars(self).update(tensors)

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"pass {name}=... to run.whole, which gave only {', '.join(vars(self)) or 'nothing'}")


def exchanged(
    asked: Mapping[str, Pending | Tensor], exchange: Exchange, batch: RolloutBatch
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """(whole tensors by name, the whole parts of each). A tensor is taken for whole as it is.

    Errors: NonFinite, naming the row of `batch`, where a number is not finite. What a reward function has failed with
    on one rank is raised on all.
    """
    for scores in [x for x in asked.values() if isinstance(x, Scores)]:
        raise_on_all_ranks(scores.failure, exchange.group)
    parts = {name: () if isinstance(x, Tensor) else x.parts() for name, x in asked.items()}
    flat = [part for some in parts.values() for part in some]
    wholes = iter(exchange.gather_all(flat) if flat else [])
    found = {name: [next(wholes) for _ in some] for name, some in parts.items()}
    known = {name: x if isinstance(x, Tensor) else x.put_together(found[name]) for name, x in asked.items()}
    check_finite(known, batch)
    return known, found
