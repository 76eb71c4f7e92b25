"""The responses of an engine, in the order of the requests."""

from collections.abc import Sequence
from typing import Any

from hybridflow.rollout.engine import Request, RolloutEngine
from hybridflow.rollout.row import RolloutRow


def responses_of(engine: RolloutEngine, requests: list[Request], params: Sequence[Any]) -> list[RolloutRow]:
    """params: by bucket."""
    found = dict(engine.stream(requests, params))
    return [found[i] for i in range(len(requests))]
