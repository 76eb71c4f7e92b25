"""A user's reward functions: finding them, calling them, and checking what they return.

    def my_reward(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        '''One number a row. `columns` are the prompt file's other keys, one entry a row.'''

is named `my_package.my_module:my_reward` in the config, where my_package is on Python's path.
"""

import importlib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hybridflow.errors import RewardError

RewardFunction = Callable[[list[str], list[str], dict[str, list[Any]]], Iterable[Any]]


def exact_match(prompts: list[str], responses: list[str], columns: dict[str, list[Any]]) -> list[float]:
    """1.0 where the response, stripped, is the `answer` column's entry; 0.0 elsewhere."""
    answers = columns["answer"]
    return [float(response.strip() == str(answer).strip()) for response, answer in zip(responses, answers, strict=True)]


def load_reward_function(path: str) -> RewardFunction:
    """The function that `package.module:function` names.

    Raises:
        RewardError: the module cannot be imported, has no such attribute, or it cannot be called.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise RewardError(f"reward function {path!r}: expected package.module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module runs on import and may raise anything
        raise RewardError(
            f"reward function {path}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        raise RewardError(f"reward function {path}: {module_name} ({_file_of(module)}) has no {attribute}")
    if not callable(function):
        raise RewardError(f"reward function {path}: is a {type(function).__name__}, which cannot be called")
    return function


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
        RewardError: it raised (the first row that raises by itself is looked for and named), or did not
            return one finite number a row. Ints, bools, 0-d tensors and numpy numbers are numbers.
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
    """What went wrong, with the first row that raises when it is scored alone."""
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        try:
            returned = function([prompt], [response], {key: [column[row]] for key, column in columns.items()})
            list(returned if _has_rows(returned) else ())
        except Exception as row_error:
            return (
                f"row {rows[row]}: raised {type(row_error).__name__}: {row_error}; "
                f"its prompt is {_shown(prompt)}, the response {_shown(response)}"
            )
    return f"raised {type(error).__name__}: {error}; none of the {len(prompts)} rows raises when scored alone"


def _file_of(module: Any) -> str:
    return getattr(module, "__file__", None) or "a namespace package"


def _shown(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
