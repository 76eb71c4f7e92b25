"""`hybridflow.rewards:matches` and `hybridflow.rewards:length_penalty`: what the text of a response alone tells.

A prompt may end in the beginning of what the assistant says, such as the <think> of many chat templates; the response
then goes on from there. `opening_of(prompt)` is that beginning.
"""

import re
from typing import Any, Literal

# at the beginning of a line, or behind a role: <|Assistant|><think>, [/INST][THINK], Assistant: <think>
OF_TURNS = "s|bos|eos|pad|unk|system|user|human|assistant|model|bot|start_of_turn|im_start"
TAG = rf"(?:</?(?!(?:{OF_TURNS})>)[A-Za-z]\w*>|\[THINK\]|<\|(?:START_THINKING|begin_of_thought)\|>)"
OPENING = re.compile(rf"(?:\A|(?<=\n)|(?<=: )|(?<=[|\uff5c]>)|(?<=\[/INST\])){TAG}(?:\s+{TAG})*\s*\Z")
MOST_OPENED = 200  # characters


def matches(
    prompts: list[str], responses: list[str], columns: dict[str, list[Any]], *, pattern: str, whole: bool = True
) -> list[float]:
    """1.0 where the response is what the regular expression says, or with `whole: false` has it somewhere; else 0.0.

    The response alone or behind what the prompt begins it with, such as <think>: either may be what it says.
    A dot matches a line's end as well. Python's `re` takes exponential time for some patterns: a row that does so is
    killed, and counts as a time-out.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    found = compiled.fullmatch if whole else compiled.search
    return [
        float(any(found(text) is not None for text in {response, opening_of(prompt) + response}))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def opening_of(prompt: str) -> str:
    """The tags at the end, with the space around them, that begin what the assistant says; "" where there are none."""
    found = OPENING.search(prompt, max(0, len(prompt) - MOST_OPENED))
    return "" if found is None else found[0]


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
