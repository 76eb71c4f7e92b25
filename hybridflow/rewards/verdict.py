"""The score that a judge gives in words: one number, or an error that tells what makes it unclear.

    verdict("8 out of 10", 0, 10)                               8.0
    verdict("It has 2 flaws.\\n\\n**7,5**", 0, 10)                7.5
    verdict('{"score": 6, "reason": "2 errors"}', 0, 10)        6.0
    verdict("Step 2 is wrong", 0, 10)                           ValueError

In this order: the score of a JSON object; the number that is the last line; the one behind the last `score:` or `I give
it`, unless the text ends in another; the only number; the only one that is a line; the one that the text ends in. What
is counted, and the ends of the scale, are no scores.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.rewards.numeric import DECIMAL
from hybridflow.rollout.thinking import behind_thoughts

MARKS = re.compile(r"""[*_`~$"'{}\[\]]|\\boxed""")
DECIMAL_COMMA = re.compile(r"(?<![\w,.])([0-9]+(?=,(?:[0-9]{1,2}|[0-9]{4,})(?![\w,]))|0(?=,[0-9]{3}(?![\w,]))),")
NUMBER = rf"(?:(?<![\w.)])[-+])?(?<![\w.]){DECIMAL}(?!\w)"
VALUE = re.compile(rf"({NUMBER})(?:\s*(?:(?:point|mark|star)s?\s*)?(?:/|\bout of\b)\s*({NUMBER}))?")
# what a judge counts or numbers, and what a scale goes from and to
THINGS = "step|part|claim|version|question|section|line|item|example|criterion|response|answer|candidate|option|point"
COUNTED = (
    r"error|flaw|mistake|issue|problem|part|step|claim|word|sentence|paragraph|example|time|fact|detail|reason|section"
)
NO_SCORE = re.compile(
    rf"\b(?:{THINGS})s?[ ]+#?[0-9]+(?:[ ]*(?:,|and|or|to|-)[ ]*[0-9]+)*\b|\b[0-9]+[ ]+(?:[a-z]+[ ]+)?(?:{COUNTED})s?\b"
    rf"|\b(?:max(?:imum)?|highest|lowest)\b[^.\n:=0-9]{{0,30}}(?:[:=]|\bis\b)[ ]*{DECIMAL}(?!\w)"
    rf"|(?:\b(?:from|between|scale of)[ ]+)?(?<![\w.]){DECIMAL}[ ]*(?:-|\u2013|\bto\b|\band\b)[ ]*{DECIMAL}(?!\w)",
    re.IGNORECASE,
)
IN_BRACKETS = re.compile(r"\([^()]*\)")
NAMES = "scores?|ratings?|grade|verdict|overall|reward|judge?ment"
NAME = re.compile(NAMES, re.IGNORECASE)
TAG = re.compile(rf"<(/?)(\w*(?:{NAMES}))>", re.IGNORECASE)  # <score>8</score>
LABEL = re.compile(
    rf"(?:\b(?:{NAMES})\b[^.\n:=0-9]{{0,30}}(?:\([^()]*\))?\s*"
    r"(?:[:=\uff1a]|\bis\b)|\bI(?:d| would| will|ll)? (?:give|rate|score|grade|assign|award)\b[^.\n0-9]{0,30})\s*"
    r"(?=[-+.0-9])",
    re.IGNORECASE,
)
OTHER_NAME = re.compile(r"[A-Za-z][ \t]*[:=][ \t]*\Z")  # Confidence: 90
FINAL = re.compile(r"final|overall|total|verdict", re.IGNORECASE)
NEAR = 20  # characters before a label


def verdict(text: str, lowest: float, highest: float) -> float:
    """Errors: ValueError for a text that has no such number, several, or one that is not in [lowest, highest]."""
    said = behind_thoughts(text)
    if said is None:
        raise ValueError("the judge's reasoning does not end, which is no score")
    for start, end, tree in reversed(list(_objects(said))):
        given = _of_object(tree)
        if given is not None:
            return _checked(*given, lowest, highest)
        said = said[:start] + said[end:]
    return _checked(*_of_words(said), lowest, highest)


def _checked(score: float, top: float | None, lowest: float, highest: float) -> float:
    if top not in (None, highest):
        raise ValueError(f"the judge says {score:g}/{top:g}; expected one number, not a fraction of another scale")
    if not lowest <= score <= highest:
        raise ValueError(f"the judge says {score:g}; expected a number from {lowest:g} to {highest:g}")
    return score


def _of_words(text: str) -> tuple[float, float | None]:
    """A number, and what it is out of."""
    text = TAG.sub(lambda tag: "\n" if tag[1] else f"\n{tag[2].replace('_', ' ')}: ", text)
    plain = NO_SCORE.sub("_", DECIMAL_COMMA.sub(r"\1.", MARKS.sub("", text.replace("\u2212", "-"))))
    labelled = [
        (found, bool(FINAL.search(plain, max(0, label.start() - NEAR), label.end())))
        for label in LABEL.finditer(plain)
        if (found := VALUE.match(plain, label.end()))
    ]
    named = [found for found, is_final in labelled if is_final] or [found for found, _ in labelled]
    outside = IN_BRACKETS.sub(" ", plain)
    plain = (outside if VALUE.search(outside) else plain).rstrip(" \t\n.!;:)_")
    values = list(VALUE.finditer(plain))
    if not values and not named:
        raise ValueError("the judge gives no number")
    alone = [VALUE.fullmatch(line.strip(" \t.!,;:()#")) for line in plain.splitlines()]
    there = [found for found in alone if found is not None]
    at_end = [values[-1]] if values and values[-1].end() == len(plain) else []
    if alone and alone[-1] is not None:
        return _pair(alone[-1])
    rivals = [found for found in at_end if not OTHER_NAME.search(plain, 0, found.start())]
    if named and not {*map(_pair, rivals)} - {_pair(found) for found, _ in labelled}:
        return _pair(named[-1])
    for some in () if named else (values, there, at_end):
        if len({*map(_pair, some)}) == 1:
            return _pair(some[0])
    raise ValueError("the judge gives several numbers, of which none is the score by its place")


def _pair(found: re.Match[str]) -> tuple[float, float | None]:
    return float(found[1].replace(",", "")), float(found[2].replace(",", "")) if found[2] else None


def _objects(text: str) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Each JSON object with a key, and where it begins and ends."""
    place = text.find("{")
    while place >= 0:
        end = place + 1
        try:
            tree, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            tree = {}
        if tree:
            yield place, end, tree
        place = text.find("{", end)


def _of_object(tree: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """Of the key with such a name, or the only number. Errors: ValueError where there are several."""
    there = {key: pair for key, value in tree.items() if (pair := _of_value(value)) is not None}
    named = {key: there[key] for key in there if NAME.search(key)}
    final = {key: there[key] for key in named if FINAL.search(key)}
    exact = {key: there[key] for key in named if NAME.fullmatch(key)}  # beside max_score
    best = final or exact or named or there
    if len({*best.values()}) > 1:
        raise ValueError(f"the judge gives several numbers: {', '.join(best)}")
    return next(iter(best.values()), None)


def _of_value(value: Any) -> tuple[float, float | None] | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value), None
    if isinstance(value, Mapping):
        return _of_object(value)
    found = VALUE.fullmatch(DECIMAL_COMMA.sub(r"\1.", value.strip())) if isinstance(value, str) else None
    return None if found is None else _pair(found)
