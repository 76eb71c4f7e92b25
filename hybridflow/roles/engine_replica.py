"""The ranks of an engine replica: each schedules and samples for itself, and all must draw the same."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hybridflow.parallel.agreement import check_agreement, digest_bytes
from hybridflow.rollout.generation import RolloutListener
from hybridflow.rollout.row import RolloutRow

DRAWN = "what the ranks of an engine replica have drawn"


def check_same_tokens(rows: Iterable[tuple[object, RolloutRow]], replica: dist.ProcessGroup | None) -> None:
    """Raise DisagreementError on all ranks of a replica unless these have the same rows with the same tokens.

    Ranks with different tokens run different engine steps, or mix one rank's tokens with another rank's KV cache.
    Collective over the replica, by 16 bytes a rank in host memory. replica: None: one rank.
    """
    if replica is not None:
        pieces = (part for key, row in rows for part in (str(key).encode(), array("q", row.token_ids).tobytes()))
        check_agreement({DRAWN: digest_bytes(*pieces)}, replica)


@dataclass(frozen=True)
class ReleasingListener:
    """A listener that releases the engine's memory by `give_back` before it forwards `on_replica_done`."""

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
