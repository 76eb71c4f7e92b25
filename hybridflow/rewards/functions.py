"""A user's reward functions: finding them, calling them, and checking what they return.

    def my_reward(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        '''One number a row. `columns` are the prompt file's other keys, one entry a row.'''

is named `my_package.my_module:my_reward` in the config; `hybridflow.user_code` says where my_package is looked for. It
may be `async def`, take more arguments by keyword, which the config gives, and return a dictionary of parts a row.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

from hybridflow.errors import RewardError, UserCodeError
from hybridflow.rewards.expected import alternatives, texts
from hybridflow.rewards.foreign import adapter
from hybridflow.user_code import load_function


class RowTracking:
    """at: the rows that were read last: one, those of a slice, those of a whole pass; none as long as none was read.

    A batch of one row is always at that row.
    """

    def __init__(self, num_rows: int) -> None:
        self.at: Sequence[int] = (0,) if num_rows == 1 else ()
        self._all = frozenset(range(num_rows))
        self._read: set[int] = set()
        self._in_loop = False

    def watched(self, values: Sequence[Any]) -> "TrackedRows":
        """A list of the values, one a row."""
        return TrackedRows(values, range(len(values)), self)

    def note(self, rows: Sequence[int], *, in_loop: bool = False) -> None:
        """in_loop: a loop asked for this row and not yet for the next."""
        self._in_loop = in_loop or (self._in_loop and tuple(rows) == tuple(self.at))
        self.at = rows
        self._read.update(rows)

    @property
    def is_past_all(self) -> bool:
        """Whether all rows were read and no loop is known to be at one of them; a single row is always the one."""
        return len(self._all) > 1 and self._read >= self._all and not self._in_loop


class TrackedRows(list[Any]):
    """A list that tells `reading` what is read of it. It may be changed: only rows still in their place count."""

    def __init__(self, values: Sequence[Any], rows: Sequence[int], reading: RowTracking) -> None:
        super().__init__(values)
        self._places = list(zip(rows, values, strict=True))  # what lay where, as far as that is known
        self._reading = reading

    @overload
    def __getitem__(self, place: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        if isinstance(place, slice):
            return self._part(place)
        value = super().__getitem__(place)
        self._note(range(len(self))[place], value)
        return value

    def __iter__(self) -> Iterator[Any]:
        for place, value in enumerate(super().__iter__()):
            self._note(place, value, in_loop=True)
            yield value
        self._reading.note([row for row, _ in self._places])

    def __contains__(self, wanted: object) -> bool:
        return any(value is wanted or value == wanted for value in self)

    def pop(self, place: SupportsIndex = -1) -> Any:
        value = super().pop(place)
        place = range(len(self) + 1)[place]
        self._note(place, value)
        del self._places[place : place + 1]
        return value

    def copy(self) -> list[Any]:
        return self[:]

    def _part(self, places: slice) -> list[Any]:
        values = super().__getitem__(places)
        rows = [row for row, _ in self._places[places]]
        if len(rows) != len(values):  # the list was changed
            return values
        if rows:
            self._reading.note(rows)
        return TrackedRows(values, rows, self._reading)

    def _note(self, place: int, value: Any, *, in_loop: bool = False) -> None:
        row, original = self._places[place] if place < len(self._places) else (0, self)
        if original is value:
            self._reading.note((row,), in_loop=in_loop)


RewardFunction = Callable[..., Any]  # of prompts, responses, columns, and what the config gives by keyword
ASKED = ("iteration", "is_evaluation", "token_ids")  # what a function may have by keyword, if it has such a parameter
MOST_COLUMNS = 12  # that a message names
USERS = (Exception, SystemExit)  # what a user's code raises that is the code's error


@dataclass(frozen=True)
class FunctionSpec:
    """A function as a config asks for it.

    per: what it is called with in one list: a row, the responses to a prompt (group), or all rows of a rollout (batch).
    parts: the keys of the dictionaries that it returns; none where it returns numbers.
    awaited: whether it is an `async def`; then one process has `concurrency` calls of it under way.
    lost_score: what a row counts as whose call took too long or ended the process; None: that ends the run.
    affine: it is a class whose instance is called with one message; all calls of a row go to one process.
    Such a class may be awaited: then each of the processes has `concurrency` calls under way.
    asks: of ASKED, the parameters that the function has.
    """

    path: str
    file: str | None  # of the function's module
    arguments: Mapping[str, Any]
    parts: tuple[str, ...]
    per: str
    timeout_seconds: float  # of a row: a call of n rows has n times as long
    awaited: bool
    concurrency: int
    background: bool
    lost_score: float | None = None
    affine: bool = False
    asks: tuple[str, ...] = ()


def exact_match(
    prompts: list[str], responses: list[str], columns: dict[str, list[Any]], *, answer: str = "answer"
) -> list[float]:
    """1.0 where the response, stripped, is the entry of the column `answer`, or one of its answers; 0.0 elsewhere.

    Errors: ValueError where the entry is no answer.
    """
    return [
        float(any(response.strip() in texts(right) for right in alternatives(given, answer)))
        for response, given in zip(responses, columns[answer], strict=True)
    ]


def load_reward_function(path: str) -> RewardFunction:
    """The function that `package.module:function` names.

    Raises:
        RewardError: there is none.
    """
    try:
        return load_function(path, "reward function")
    except UserCodeError as error:
        raise RewardError(str(error)) from error


def check_arguments(function: RewardFunction, path: str, arguments: Mapping[str, Any]) -> None:
    """Raise RewardError unless the function takes these by keyword, needs no others, and is not another trainer's."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it will tell when it is called
        return
    foreign = adapter(signature, path, awaited=is_async(function))
    if foreign is not None:
        raise RewardError(foreign)
    try:
        signature.bind([], [], {}, **arguments, **dict.fromkeys(asked_of(function, arguments)))
    except TypeError as error:
        given = ", ".join(arguments) or "none"
        raise RewardError(
            f"reward function {path}: {error}; it is called with prompts, responses, columns and the arguments of the "
            f"config, here {given}; its signature is {signature}"
        ) from error


def asked_of(function: RewardFunction, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of ASKED the function is given: by keyword, where the config does not give it."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return ()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name in ASKED if name in known and name not in arguments and known[name].kind in kinds)


def is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call_reward_function(
    function: RewardFunction,
    name: str,
    prompts: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    rows: Sequence[int] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> list[float]:
    """The scores of these rows, each a finite float. The function gets copies that it may change.

    Args:
        name: what messages call the function.
        rows: what messages number the rows by, where they are some of a larger batch; from 0 if left out.

    Raises:
        RewardError: it raised (with several rows it is then called once more, and the one that it had read last is
            named), or did not return one finite number a row. Ints, bools, 0-d tensors and numpy numbers are numbers.
    """
    asked = FunctionCall(
        name, prompts, responses, columns, range(len(prompts)) if rows is None else rows, arguments=arguments or {}
    )
    return [score for (score,) in call_for_parts(function, asked)]


@dataclass(frozen=True)
class FunctionCall:
    """What a function is called with, what messages call it, and what they number the rows by.

    parts: of the dictionaries that it returns, one a row; none where it returns numbers.
    """

    name: str
    prompts: Sequence[str]
    responses: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    rows: Sequence[int]
    arguments: Mapping[str, Any]
    parts: tuple[str, ...] = ()

    def copies(self) -> tuple[list[str], list[str], dict[str, list[Any]]]:
        return list(self.prompts), list(self.responses), {key: list(column) for key, column in self.columns.items()}


def call_for_parts(function: RewardFunction, asked: FunctionCall) -> list[tuple[float, ...]]:
    """Of each row the score, or each part of it. Errors: as `call_reward_function`."""
    try:
        returned = function(*asked.copies(), **asked.arguments)
        results = list(returned) if _has_rows(returned) else None  # a generator may raise here
    except USERS as error:  # the boundary to a user's code
        raise RewardError(f"reward function {asked.name}: {_explain_failure(function, asked, error)}") from error
    return _checked_rows(returned, results, asked)


async def await_for_parts(function: RewardFunction, asked: FunctionCall) -> list[tuple[float, ...]]:
    """The same of an `async def`, which is not called again to find the row."""
    try:
        returned = await function(*asked.copies(), **asked.arguments)
        results = list(returned) if _has_rows(returned) else None
    except USERS as error:
        raised = _raised(error, asked)
        problem = _at_row(asked, 0, raised) if len(asked.rows) == 1 else f"{raised}, {_all_of(asked)}"
        raise RewardError(f"reward function {asked.name}: {problem}") from error
    return _checked_rows(returned, results, asked)


def _checked_rows(returned: Any, results: list[Any] | None, asked: FunctionCall) -> list[tuple[float, ...]]:
    name, wanted = asked.name, len(asked.prompts)
    where = f"row {asked.rows[0]}: " if wanted == 1 else ""
    if results is None:
        raise RewardError(
            f"reward function {name}: {where}returned {type(returned).__name__}; expected {_number(wanted, 'number')}"
        )
    if len(results) != wanted:
        raise RewardError(
            f"reward function {name}: {where}returned {_number(len(results), 'number')} for {_number(wanted, 'row')}; "
            f"expected one a row"
        )
    return [
        _parts(value, f"reward function {name}: row {row}", f"its prompt is {_shown(prompt)}", asked.parts)
        for row, prompt, value in zip(asked.rows, asked.prompts, results, strict=True)
    ]


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _parts(value: Any, where: str, prompt: str, parts: tuple[str, ...]) -> tuple[float, ...]:
    """Of one row: the number itself where it has no parts."""
    if not parts:
        hint = "; the parts of a dictionary are named in `parts`" if isinstance(value, Mapping) else ""
        return (_checked(value, where, f"{prompt}{hint}"),)
    if not isinstance(value, Mapping) or set(value) != set(parts):
        raise RewardError(
            f"{where}: scored {_shown(value)}; expected a dictionary with the keys of `parts`, {', '.join(parts)}"
            f"{unlike(value, parts)}; {prompt}"
        )
    return tuple(_checked(value[part], f"{where}, part {part}", prompt) for part in parts)


def unlike(value: Any, parts: Sequence[str]) -> str:
    """What to add to a message: the keys that a dictionary lacks, and those that it has besides."""
    if not isinstance(value, Mapping):
        return ""
    lacking = ", ".join(part for part in parts if part not in value)
    extra = ", ".join(str(key) for key in value if key not in parts)
    return (f"; {lacking} is missing" if lacking else "") + (f"; {extra} is not among them" if extra else "")


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


def _explain_failure(function: RewardFunction, asked: FunctionCall, error: BaseException) -> str:
    """What went wrong, and in which row: the function is called once more, with lists that know what is read."""
    raised = _raised(error, asked)
    if len(asked.prompts) == 1:
        return _at_row(asked, 0, raised)
    reading = RowTracking(len(asked.prompts))
    watched: dict[str, list[Any]] = {key: reading.watched(column) for key, column in asked.columns.items()}
    try:
        returned = function(
            reading.watched(asked.prompts), reading.watched(asked.responses), watched, **asked.arguments
        )
        list(returned if _has_rows(returned) else ())
    except USERS as again:
        if type(again) is not type(error):
            return f"{raised}; called once more to find the row, it {_raised(again, asked)}"
    else:
        return f"{raised}; called once more with the same {len(asked.prompts)} rows, it raised nothing"
    return _read_last(asked, reading, raised)


def _read_last(asked: FunctionCall, reading: RowTracking, raised: str) -> str:
    rows = asked.rows
    if reading.is_past_all:
        last = "" if len(reading.at) > 1 else f", row {rows[reading.at[0]]} last"
        return f"{raised}, after it had read all rows{last}"
    if not reading.at:
        return f"{raised}; which row it was at cannot be told"
    if len(reading.at) > 1:
        return f"{raised}, among rows {rows[reading.at[0]]} to {rows[reading.at[-1]]}"
    return _at_row(asked, reading.at[0], raised)


def _at_row(asked: FunctionCall, place: int, what: str) -> str:
    prompt, response = _shown(asked.prompts[place]), _shown(asked.responses[place])
    return f"row {asked.rows[place]}: {what}; its prompt is {prompt}, the response {response}"


def _all_of(asked: FunctionCall) -> str:
    return f"among rows {asked.rows[0]} to {asked.rows[-1]}" if asked.rows else "of no rows"


def _raised(error: BaseException, asked: FunctionCall) -> str:
    """With the columns that there are, where it looked for another key."""
    raised = f"raised {type(error).__name__}: {error}"
    if not isinstance(error, KeyError) or not error.args or error.args[0] in asked.columns:
        return raised
    there = ", ".join(list(asked.columns)[:MOST_COLUMNS]) or "none"
    return f"{raised} (the columns are {there}; data.columns gives one another name, `arguments` the function another)"


def _shown(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
