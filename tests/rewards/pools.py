"""Pools of this process for tests, of functions by name."""

import contextlib
from collections.abc import Iterator
from typing import Any

from hybridflow.rewards.functions import FunctionSpec
from hybridflow.rewards.pool import Outcome, Pool, PoolLimits

MISBEHAVING = "tests.rewards.misbehaving"


def spec(path: str, **changes: Any) -> FunctionSpec:
    known: dict[str, Any] = {
        "file": None,
        "arguments": {},
        "parts": (),
        "per": "row",
        "timeout_seconds": 30.0,
        "awaited": False,
        "concurrency": 8,
        "background": True,
    }
    return FunctionSpec(path=path, **known | changes)


@contextlib.contextmanager
def pool_of(
    *specs: FunctionSpec, num_workers: int = 1, memory_gib: float = 1.0, max_processes: int = 40
) -> Iterator[Pool]:
    pool = Pool(specs, PoolLimits(num_workers, int(memory_gib * (1 << 30)), max_processes))
    try:
        yield pool
    finally:
        pool.close()


def rows(*responses: str, first: int = 0, **columns: list[Any]) -> dict[str, Any]:
    numbers = list(range(first, first + len(responses)))
    return {"prompts": ["p"] * len(numbers), "responses": list(responses), "columns": columns, "rows": numbers}


def asked(pool: Pool, function: int, *responses: str, **columns: list[Any]) -> Outcome:
    return pool.outcome(pool.submit(function, rows(*responses, **columns)))
