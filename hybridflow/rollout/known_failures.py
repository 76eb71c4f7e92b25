"""What the engine of this rank generates, or the error that ends the run, known to all ranks before they exchange."""

import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from hybridflow.errors import Stopped
from hybridflow.parallel.agreement import raise_known
from hybridflow.parallel.rank_log import IN_FILES_ALONE
from hybridflow.rollout.engine import RolloutEngine
from hybridflow.rollout.generation import RolloutListener

LOG = logging.getLogger(__name__)
T = TypeVar("T")


def or_known(
    generate: Callable[[], T],
    engine: RolloutEngine | None,
    group: dist.ProcessGroup,
    *,
    size: int,
    listener: RolloutListener | None = None,
) -> T | None:
    """What `generate` gives. An error of all ranks of one replica is raised on all ranks. Collective over the group.

    size: ranks of a replica. Of several only errors of what answers the model are such: all of them hear of these.
    """
    found, failure = None, None
    try:
        found = generate()
    except Exception as error:
        if isinstance(error, Stopped) or not (size == 1 or getattr(error, "of_replica", False)):
            raise
        failure = error
        LOG.error("told when all ranks have generated: %s: %s", type(error).__name__, error, extra=IN_FILES_ALONE)
        with contextlib.suppress(Exception):  # an engine that has failed may fail here too: the run ends
            if engine is not None:
                engine.abort_all()
        if listener is not None:
            listener.on_failure()
    raise_known(failure, group)
    return found
