"""The reward functions of a config as the pool calls them: found, checked and numbered, in one order on every rank."""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config import ExperimentConfig
from hybridflow.config.rewards import EvalRewardConfig, RemoteRewardConfig, RewardFunctionConfig, ScoringConfig
from hybridflow.errors import RewardError
from hybridflow.rewards.code_tests import cases
from hybridflow.rewards.expected import alternatives
from hybridflow.rewards.functions import FunctionSpec
from hybridflow.rewards.mathematics import check_formula
from hybridflow.rewards.numeric import numbers
from hybridflow.rewards.pool import PoolLimits
from hybridflow.rewards.probe import Described, described

SHIPPED = re.compile(r"hybridflow\.rewards[.:]")  # modules whose functions a row of a hostile response must not end
# what the shipped functions read of a row: by the argument that names the column, or always
NAMES_COLUMN = {"exact_match": "answer", "math_equal": "answer", "numeric_match": "answer", "passes_tests": "tests"}
COLUMNS = {"reasoning_gym": ("task", "entry")}
READERS: dict[str, Callable[[Any, str], object]] = {  # that raise a ValueError for an entry which nothing can score
    "exact_match": alternatives,
    "math_equal": check_formula,
    "numeric_match": numbers,
}
WRONG = 0.0  # what they score a response that is wrong
MOST_WORKERS = 8  # of a rank, unless the config says how many
GIB = 1 << 30


def pool_specs(config: ExperimentConfig) -> tuple[FunctionSpec, ...]:
    """Those of the `reward` section, `functions` then `remote`, and that of metrics.eval_reward, where there are any.

    Errors: RewardError naming the function, or the field.
    """
    scoring = config.reward or ScoringConfig()
    right = config.metrics.eval_reward
    last = [] if right is None else [_of_evaluation(right, scoring.functions)]
    specs = _specs([*scoring.functions, *last], scoring)
    own = len(scoring.functions)
    return (*specs[:own], *map(_remote_spec, scoring.remote), *specs[own:])


def check_row(config: ExperimentConfig, key: str, columns: Mapping[str, Any]) -> None:
    """Errors: ValueError where a shipped function cannot read its column. key: data.train, or that of held-out rows.

    Where failed rows have a score of their own, such a row is one of them.
    """
    scoring, right = config.reward or ScoringConfig(), config.metrics.eval_reward
    if scoring.on_error == "score":
        return
    judging = config.reward_functions_judge and config.metrics.eval_interval > 0
    judges = [*scoring.functions] if key == "data.train" or judging else []
    if key != "data.train" and right is not None:
        judges = [_of_evaluation(right, scoring.functions)]
    for function in judges:
        name, given = function.function.rpartition(":")[2], function.arguments
        own = NAMES_COLUMN.get(name, "") if SHIPPED.match(function.function) else ""
        column = str(given.get(own, own))
        if column not in columns:
            continue  # `check_columns` tells
        if name in READERS:
            READERS[name](columns[column], column)
        else:
            cases(columns[column], column, columns.get(str(given.get("entry_point", "entry_point"))))


def check_columns(config: ExperimentConfig, columns: Collection[str], where: str) -> None:
    """Errors: RewardError where a row lacks a column that a shipped function reads. where: the row stands."""
    scoring, right = config.reward or ScoringConfig(), config.metrics.eval_reward
    named = [(f"reward.functions.{i}", function) for i, function in enumerate(scoring.functions)]
    named += [] if right is None else [("metrics.eval_reward", _of_evaluation(right, scoring.functions))]
    for key, function in named:
        module, _, name = function.function.rpartition(":")
        if not SHIPPED.match(function.function):
            continue
        own = NAMES_COLUMN.get(name)
        for column in COLUMNS.get(name, ()) if own is None else (str(function.arguments.get(own, own)),):
            if column not in columns:
                hint = f"; arguments: {{{own}: COLUMN}} names another" if own is not None else ""
                raise RewardError(
                    f"{where}: has no column {column!r}, which {key} = {module}:{name} reads; its columns are "
                    f"{', '.join(columns) or 'none'}{hint}"
                )


def pool_limits(config: ScoringConfig, num_ranks: int) -> PoolLimits:
    """Of each of so many ranks on this machine."""
    share = len(os.sched_getaffinity(0)) // num_ranks
    return PoolLimits(
        num_workers=config.num_workers or max(1, min(MOST_WORKERS, share)),
        memory_bytes=None if config.memory_gib is None else int(config.memory_gib * GIB),
        max_processes=config.max_processes,
    )


def function_names(config: ScoringConfig) -> tuple[str, ...]:
    """What metrics call each of `functions`: the name, with a number where several have that name; then `remote_0`."""
    own = [function.function.rpartition(":")[2] for function in config.functions]
    named = [name if own.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(own)]
    return (*named, *(f"remote_{i}" for i in range(len(config.remote))))


def function_weights(config: ScoringConfig) -> tuple[tuple[float, ...], ...]:
    """Of each of `functions` and `remote`, of each part."""
    of_functions = [
        tuple(function.weight * weight for weight in function.parts.values()) or (function.weight,)
        for function in config.functions
    ]
    return (*of_functions, *((remote.weight,) for remote in config.remote))


def judging_weights(config: ScoringConfig) -> tuple[tuple[float, ...], ...]:
    """The same where the sum says what is right: penalties of length do not."""
    shaping = [function.shapes_length for function in config.functions] + [False] * len(config.remote)
    both = zip(function_weights(config), shaping, strict=True)
    return tuple((0.0,) * len(weights) if shapes else weights for weights, shapes in both)


def _of_evaluation(right: EvalRewardConfig, functions: Sequence[RewardFunctionConfig]) -> RewardFunctionConfig:
    """With the function's arguments, or those that all of the kind in reward.functions have."""
    given = [function.arguments for function in functions if function.function == right.function]
    shared = given[0] if given and all(arguments == given[0] for arguments in given) else {}
    arguments = shared if right.arguments is None else right.arguments
    return RewardFunctionConfig(function=right.function, arguments=arguments, background=False)


def _specs(functions: Sequence[RewardFunctionConfig], scoring: ScoringConfig) -> tuple[FunctionSpec, ...]:
    found = described([(function.function, function.arguments) for function in functions])
    return tuple(_spec(*one, scoring) for one in zip(functions, found, strict=True))


def _spec(config: RewardFunctionConfig, found: Described, scoring: ScoringConfig) -> FunctionSpec:
    goes_on = scoring.on_error == "auto" and SHIPPED.match(config.function) is not None
    return FunctionSpec(
        path=config.function,
        file=found.file,
        arguments=config.arguments,
        parts=tuple(config.parts),
        per=config.per,
        timeout_seconds=config.timeout_seconds or scoring.timeout_seconds,
        awaited=found.awaited,
        concurrency=config.concurrency,
        background=config.background and config.per != "batch",
        lost_score=WRONG if goes_on else None,
        asks=found.asks,
    )


def _remote_spec(config: RemoteRewardConfig) -> FunctionSpec:
    arguments: dict[str, Any] = {
        "url": config.url,
        "request_seconds": config.request_seconds,
        "retries": config.retries,
        "backoff_seconds": config.backoff_seconds,
        "api_key": None if config.api_key_file is None else word_of(config.api_key_file, "reward.remote: api_key_file"),
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
        file=None,
        arguments=arguments,
        parts=(),
        per="row",
        timeout_seconds=config.seconds(),
        awaited=True,
        concurrency=config.max_in_flight,
        background=True,
    )


def word_of(file: str, field: str) -> str:
    """The first word of a file that holds a secret. Errors: RewardError naming the field."""
    try:
        words = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"{field} = {file}: cannot be read: {error}") from error
    if not words:
        raise RewardError(f"{field} = {file}: is empty")
    return words[0]
