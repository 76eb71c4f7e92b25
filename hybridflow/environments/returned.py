"""What a user's class or agent returns: messages, a number, or the parts of a reward."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.functions import unlike

Message = dict[str, Any]
USERS = (Exception, SystemExit)  # what a user's code raises that is an error of its own
MOST_SHOWN = 200  # characters of a value in a message


def reward_parts(returned: Any, parts: Sequence[str], what: str, expected: str) -> list[float]:
    """The number of each part of a reward; one without parts. what: has been returned, and expected: without parts.

    Errors: RewardError unless it is what the config says.
    """
    if not parts:
        return [_number(returned, what, expected)]
    if not isinstance(returned, Mapping) or set(returned) != set(parts):
        raise RewardError(
            f"{what} {shown(returned)}; data.environment.parts asks for a dictionary of {', '.join(parts)}"
            f"{unlike(returned, parts)}"
        )
    return [_number(returned[part], f"{what} {part} =", expected) for part in parts]


def checked_messages(given: Any, method: str, *, begins: bool = False) -> list[Message]:
    """begins: a conversation, in which the assistant may have spoken before; the model speaks behind the last message.

    Errors: RewardError unless they are messages with a role and a text.
    """
    if not isinstance(given, list | tuple) or not given:
        raise RewardError(f"{method} returned {shown(given)}; expected a list of messages")
    for message in given:
        fine = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fine:
            raise RewardError(f"{method} returned the message {shown(message)}; expected role and content as texts")
        if message["role"] == "assistant" and not (begins and message is not given[-1]):
            raise RewardError(f"{method} returned a message of the assistant, {shown(message)}: the model speaks there")
    return [dict(message) for message in given]


def _number(given: Any, what: str, expected: str) -> float:
    if hasattr(given, "item"):  # of numpy or torch
        given = given.item()
    if not isinstance(given, numbers.Real) or not math.isfinite(given):
        raise RewardError(f"{what} {shown(given)}; expected {expected} as the reward")
    return float(given)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
