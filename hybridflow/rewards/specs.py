"""The reward functions of a config as the pool calls them: found, checked and numbered, in one order on every rank."""

import os
from pathlib import Path
from typing import Any

from hybridflow.config import ExperimentConfig
from hybridflow.errors import RewardError
from hybridflow.reward_config import RemoteRewardConfig, RewardFunctionConfig, ScoringConfig
from hybridflow.rewards.functions import FunctionSpec, check_arguments, is_async, load_reward_function
from hybridflow.rewards.pool import PoolLimits

OWN = "hybridflow.rewards."  # modules whose functions take no rows without a word: so their arguments are tried
MOST_WORKERS = 8  # of a rank, unless the config says how many
GIB = 1 << 30


def reward_specs(config: ScoringConfig) -> tuple[FunctionSpec, ...]:
    """Of `functions`, then of `remote`. Errors: RewardError naming the function, or the field."""
    functions = [_spec(function, config.timeout_seconds) for function in config.functions]
    return (*functions, *(_remote_spec(remote) for remote in config.remote))


def pool_specs(config: ExperimentConfig) -> tuple[FunctionSpec, ...]:
    """Those of the `reward` section, and then that of metrics.eval_reward, where there are any."""
    specs = reward_specs(config.reward) if config.reward is not None else ()
    if config.metrics.eval_reward is None:
        return specs
    right = RewardFunctionConfig(function=config.metrics.eval_reward, background=False)
    return (*specs, _spec(right, (config.reward or ScoringConfig()).timeout_seconds))


def pool_limits(config: ScoringConfig, num_ranks: int) -> PoolLimits:
    """Of each of so many ranks on this machine."""
    share = len(os.sched_getaffinity(0)) // num_ranks
    return PoolLimits(
        num_workers=config.num_workers or max(1, min(MOST_WORKERS, share)),
        memory_bytes=None if config.memory_gib is None else int(config.memory_gib * GIB),
        max_processes=config.max_processes,
    )


def function_names(config: ScoringConfig) -> tuple[str, ...]:
    """What metrics call each of `reward_specs`: its own name, with its number where several have it; `remote_0`."""
    own = [function.function.rpartition(":")[2] for function in config.functions]
    named = [name if own.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(own)]
    return (*named, *(f"remote_{i}" for i in range(len(config.remote))))


def function_weights(config: ScoringConfig) -> tuple[tuple[float, ...], ...]:
    """Of each of `reward_specs`, of each of its parts."""
    of_functions = [
        tuple(function.weight * weight for weight in function.parts.values()) or (function.weight,)
        for function in config.functions
    ]
    return (*of_functions, *((remote.weight,) for remote in config.remote))


def _spec(config: RewardFunctionConfig, timeout_seconds: float) -> FunctionSpec:
    function = load_reward_function(config.function)
    check_arguments(function, config.function, config.arguments)
    spec = FunctionSpec(
        path=config.function,
        arguments=config.arguments,
        parts=tuple(config.parts),
        per=config.per,
        timeout_seconds=config.timeout_seconds or timeout_seconds,
        awaited=is_async(function),
        concurrency=config.concurrency,
        background=config.background and config.per != "batch",
    )
    _try_own(function, spec)
    return spec


def _try_own(function: Any, spec: FunctionSpec) -> None:
    """Have a shipped function refuse values of arguments that it cannot use, before the run."""
    if spec.awaited or not getattr(function, "__module__", "").startswith(OWN):
        return
    try:
        function([], [], _NoRows(), **spec.arguments)
    except (ValueError, TypeError) as error:
        raise RewardError(f"reward function {spec.path}: arguments {dict(spec.arguments)}: {error}") from error


class _NoRows(dict[str, list[Any]]):
    """Columns of a batch without rows, by any name."""

    def __missing__(self, name: str) -> list[Any]:
        return []


def _remote_spec(config: RemoteRewardConfig) -> FunctionSpec:
    arguments: dict[str, Any] = {
        "url": config.url,
        "request_seconds": config.request_seconds,
        "retries": config.retries,
        "backoff_seconds": config.backoff_seconds,
        "api_key": _api_key(config),
    }
    if config.kind == "openai":
        arguments |= {
            "model": config.model,
            "template": config.template,
            "max_tokens": config.max_tokens,
            "lowest": config.lowest,
            "highest": config.highest,
        }
    return FunctionSpec(
        path="hybridflow.rewards.remote:" + {"json": "json_score", "openai": "judge_score"}[config.kind],
        arguments=arguments,
        parts=(),
        per="row",
        timeout_seconds=config.seconds(),
        awaited=True,
        concurrency=config.max_in_flight,
        background=True,
    )


def _api_key(config: RemoteRewardConfig) -> str | None:
    if config.api_key_file is None:
        return None
    try:
        lines = Path(config.api_key_file).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"reward.remote: api_key_file = {config.api_key_file}: cannot be read: {error}") from error
    if not lines:
        raise RewardError(f"reward.remote: api_key_file = {config.api_key_file}: is empty")
    return lines[0]
