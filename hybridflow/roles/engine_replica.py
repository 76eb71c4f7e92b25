"""The ranks of an engine replica: each schedules and samples for itself, and all must draw the same."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hybridflow.parallel.agreement import check_agreement, digest_bytes
from hybridflow.rollout.generation import RolloutListener
from hybridflow.rollout.row import RolloutRow

DRAWN = "what the ranks of an engine replica have drawn"


def check_drawn(rows: Iterable[tuple[object, RolloutRow]], replica: dist.ProcessGroup | None) -> None:
    """Raise DisagreementError on all ranks of a replica unless these have the same rows with the same tokens.

    Ranks that part run unlike steps, or compute tokens of one rank with keys of another. Collective over the replica,
    by 16 bytes a rank in host memory. replica: None of one rank.
    """
    if replica is not None:
        pieces = (part for key, row in rows for part in (str(key).encode(), array("q", row.token_ids).tobytes()))
        check_agreement({DRAWN: digest_bytes(*pieces)}, replica)


@dataclass(frozen=True)
class ReleasingListener:
    """Hears of the end of a replica when what the engine had is given back."""

    give_back: Callable[[], None]
    listener: RolloutListener

    def on_response(self, row: int, response: RolloutRow) -> None:
        self.listener.on_response(row, response)

    def on_engine_step(self) -> None:
        self.listener.on_engine_step()

    def on_failure(self) -> None:
        self.listener.on_failure()

    def on_replica_done(self, prompts: Sequence[int], responses: Sequence[RolloutRow]) -> None:
        self.give_back()
        self.listener.on_replica_done(prompts, responses)
