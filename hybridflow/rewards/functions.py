"""A user's reward functions: finding them, calling them, and checking what they return.

    def my_reward(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        '''One number a row. `columns` are the prompt file's other keys, one entry a row.'''

is named `my_package.my_module:my_reward` in the config; `hybridflow.user_code` says where my_package is looked for.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hybridflow.errors import RewardError, UserCodeError
from hybridflow.rewards.reading import Reading
from hybridflow.user_code import load_function

RewardFunction = Callable[[list[str], list[str], dict[str, list[Any]]], Iterable[Any]]


def exact_match(prompts: list[str], responses: list[str], columns: dict[str, list[Any]]) -> list[float]:
    """1.0 where the response, stripped, is the `answer` column's entry; 0.0 elsewhere."""
    answers = columns["answer"]
    return [float(response.strip() == str(answer).strip()) for response, answer in zip(responses, answers, strict=True)]


def load_reward_function(path: str) -> RewardFunction:
    """The function that `package.module:function` names.

    Raises:
        RewardError: there is none.
    """
    try:
        return load_function(path, "reward function")
    except UserCodeError as error:
        raise RewardError(str(error)) from error


def call_reward_function(
    function: RewardFunction,
    name: str,
    prompts: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    rows: Sequence[int] | None = None,
) -> list[float]:
    """The scores of these rows, each a finite float. The function gets copies that it may change.

    Args:
        name: what messages call the function.
        rows: what messages number the rows by, where they are some of a larger batch; from 0 if left out.

    Raises:
        RewardError: it raised (it is then called once more, and the row that it had read last is named), or did
            not return one finite number a row. Ints, bools, 0-d tensors and numpy numbers are numbers.
    """
    rows = range(len(prompts)) if rows is None else rows
    copies = {key: list(column) for key, column in columns.items()}
    try:
        returned = function(list(prompts), list(responses), copies)
        results = list(returned) if _has_rows(returned) else None  # a generator may raise here
    except Exception as error:  # the boundary to a user's code
        problem = _explain_failure(function, prompts, responses, columns, error=error, rows=rows)
        raise RewardError(f"reward function {name}: {problem}") from error
    if results is None:
        raise RewardError(
            f"reward function {name}: returned {type(returned).__name__}; expected {len(prompts)} numbers"
        )
    if len(results) != len(prompts):
        raise RewardError(
            f"reward function {name}: returned {len(results)} numbers for {len(prompts)} rows; expected one a row"
        )
    return [
        _checked(value, f"reward function {name}: row {row}", f"its prompt is {_shown(prompt)}")
        for row, prompt, value in zip(rows, prompts, results, strict=True)
    ]


def _has_rows(returned: Any) -> bool:
    """Whether it is a list, tuple, generator, 1-d tensor or array, or the like: one entry after another."""
    scalar = getattr(returned, "ndim", None) == 0
    return isinstance(returned, Iterable) and not scalar and not isinstance(returned, str | Mapping)


def _checked(value: Any, where: str, prompt: str) -> float:
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # 0-d tensors, numpy numbers
    if not isinstance(number, numbers.Real):
        raise RewardError(f"{where}: scored {_shown(value)}, a {type(value).__name__}; expected a number; {prompt}")
    if not math.isfinite(number):
        raise RewardError(f"{where}: scored {float(number)!r}; a score is finite; {prompt}")
    return float(number)


def _explain_failure(
    function: RewardFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    error: Exception,
    rows: Sequence[int],
) -> str:
    """What went wrong, and in which row: the function is called once more, with lists that know what is read."""
    raised = f"raised {type(error).__name__}: {error}"
    reading = Reading(len(prompts))
    watched: dict[str, list[Any]] = {key: reading.watched(column) for key, column in columns.items()}
    try:
        returned = function(reading.watched(prompts), reading.watched(responses), watched)
        list(returned if _has_rows(returned) else ())
    except Exception as again:
        if type(again) is not type(error):
            return f"{raised}; called once more to find the row, it raised {type(again).__name__}: {again}"
    else:
        return f"{raised}; called once more with the same {len(prompts)} rows, it raised nothing"
    if reading.is_past_all:
        last = "" if len(reading.at) > 1 else f", row {rows[reading.at[0]]} last"
        return f"{raised}, after it had read all rows{last}"
    if not reading.at:
        return f"{raised}; which row it was at cannot be told"
    if len(reading.at) > 1:
        return f"{raised}, among rows {rows[reading.at[0]]} to {rows[reading.at[-1]]}"
    row = reading.at[0]
    return f"row {rows[row]}: {raised}; its prompt is {_shown(prompts[row])}, the response {_shown(responses[row])}"


def _shown(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
