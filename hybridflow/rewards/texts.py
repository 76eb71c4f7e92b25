"""`hybridflow.rewards:matches` and `hybridflow.rewards:length_penalty`: what the text of a response alone tells."""

import re
from typing import Any, Literal


def matches(
    prompts: list[str], responses: list[str], columns: dict[str, list[Any]], *, pattern: str, whole: bool = True
) -> list[float]:
    """1.0 where the response is what the regular expression says, or with `whole: false` has it somewhere; else 0.0.

    A dot matches a line's end as well. Python's `re` takes exponential time for some patterns: a row that does so is
    killed, and counts as a time-out.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    found = compiled.fullmatch if whole else compiled.search
    return [float(found(response) is not None) for response in responses]


def length_penalty(
    prompts: list[str],
    responses: list[str],
    columns: dict[str, list[Any]],
    *,
    start: int,
    limit: int,
    unit: Literal["characters", "words"] = "characters",
) -> list[float]:
    """0.0 up to a length of `start`, from there in a line down to -1.0 at `limit`, and not below.

    Tokens before the limit of a run are `reward.overlong`'s.
    """
    if not 0 <= start < limit:
        raise ValueError(f"start = {start} and limit = {limit}: 0 <= start < limit")
    if unit not in ("characters", "words"):
        raise ValueError(f"unit = {unit!r} is neither characters nor words")
    lengths = [len(response) if unit == "characters" else len(response.split()) for response in responses]
    return [-min(1.0, max(0, length - start) / (limit - start)) for length in lengths]
