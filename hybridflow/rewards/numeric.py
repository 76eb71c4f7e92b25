r"""`hybridflow.rewards:numeric_match`: whether the number that a response ends in is that of the row's answer.

Where a text has a `####` (as GSM8K's solutions) or a `\boxed{...}`, the last of these says where the number is, and
what stands there has to be one number (`rewards/numeric.py`): \boxed{2\sqrt{3}} is none. Words such as "No, the
answer is 5" behind that take it back. In any other text the last number counts, unless that is a part of a formula.
Thoughts that end do not count. Numbers are compared as fractions: 1,234.50 is 1234.5, 3/4 is \frac{3}{4} and 0.75, $5
is 5 and 50% is 50.

    one_number("x = 5\text{ m}^2")     5
    one_number("2\sqrt{3}")            None: a formula
    one_number("5 or 7")               None: two
    last_number("so 3 + 4 = 7 eggs")   7
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from hybridflow.rewards.expected import alternatives, plain
from hybridflow.rollout.thinking import behind_thoughts

TAKES_BACK = re.compile(
    r"\b(?:wait|actually|correct(?:ion|ed)|sorry|mistake|wrong|instead|rather|oops|no)\b", re.IGNORECASE
)
BRACE = re.compile(r"\\boxed\{|[{}]")
ANSWER = re.compile(r"\banswer\s*(?:is|:|=)\s*([^\n]*?)(?=[.!?](?:\s|\Z)|\n|\Z)", re.IGNORECASE)


def numeric_match(
    prompts: list[str], responses: list[str], columns: dict[str, list[Any]], *, answer: str = "answer"
) -> list[float]:
    """1.0 where both numbers are equal, else 0.0. answer: the column; of several answers each is right.

    Errors: ValueError where it holds no number.
    """
    return [
        float(number_in(response) in numbers(expected, answer))
        for response, expected in zip(responses, columns[answer], strict=True)
    ]


def number_in(text: str) -> Fraction | None:
    """The one that the text ends in; None where there is none in the place that counts."""
    text = said_at_last(text)
    marked = _marked(text)
    return last_number(text) if marked is None else one_number(marked)


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, with the braces in it paired; None where there is none that ends."""
    start = text.rfind("\\boxed{")
    end = boxes(text[start:]).get(0) if start >= 0 else None
    return None if end is None else text[start:][len("\\boxed{") : end - 1]


def boxes(text: str) -> dict[int, int]:
    """Where each box that ends begins and ends."""
    found, opened = dict[int, int](), list[re.Match[str]]()
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and len((first := opened.pop())[0]) > 1:
            found[first.start()] = brace.end()
    return found


def numbers(value: Any, column: str) -> set[Fraction]:
    """The right ones of a row. Errors: ValueError naming the column and the value where there is none."""
    given = [one for one in alternatives(value, column) if not isinstance(one, bool)]
    found = {number for one in given if (number := number_in(plain(one))) is not None}
    if not found:
        raise ValueError(
            f"column {column!r}: {value!r} holds no number, or a formula with one, which hybridflow.rewards:math_equal "
            f"compares"
        )
    return found


def said_at_last(text: str) -> str:
    """Behind the thoughts, where something is said there; without a box at the end that has nothing in it."""
    said = (behind_thoughts(text) or text).rstrip()
    said = said if said else text
    while said.endswith("\\boxed{"):
        said = said[: -len("\\boxed{")].rstrip()
    return said


def taken_back(text: str) -> str | None:
    """The answer in words such as "Wait, that is wrong. The answer is 5."; None where there is none."""
    word = TAKES_BACK.search(text)
    said = [] if word is None else [found[1] for found in ANSWER.finditer(text, word.end())]
    return next((each for each in reversed(said) if one_number(each) is not None), None)


def _marked(text: str) -> str | None:
    """What stands in the last place that says where the number is; None where there is no such place."""
    line, box = text.rfind("####"), text.rfind("\\boxed{")
    if max(line, box) < 0:
        return None
    if box > line:
        marked = boxed(text) or ""  # one that does not end was cut within a number
    else:
        lines: Sequence[str] = text[line + len("####") :].strip().splitlines()
        marked = lines[0] if lines else ""
    return taken_back(text[max(line, box) + len(marked) :]) or marked


DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
# a sign belongs to a number unless it stands between two: of 7-5 the last is 5
NUMBER = re.compile(
    rf"(?:(?<![\w.)\]])(?P<sign>[-+]))?(?:(?P<whole>[0-9]+)\s+(?=[0-9]+/[0-9]))?"
    rf"(?P<top>{DECIMAL})(?:\s*/\s*(?P<bottom>{DECIMAL}))?"
)
FRAC = re.compile(r"\\[dt]?frac\s*(?:\{\s*([^{}]*?)\s*\}|([0-9]))\s*(?:\{\s*([^{}]*?)\s*\}|([0-9]))")
PLAIN = (("\u2212", "-"), ("{,}", ","), ("\\$", ""), ("$", ""), ("\\%", ""), ("%", ""), ("\\,", ""), ("\\!", ""))
MOST_DIGITS = 1000  # Python refuses to read numbers of more than 4300

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|bf|rm)\s*\{([^{}]*)\}")
DEGREE = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|\u00b0")
SPACES = re.compile(r"\\(?:quad|qquad|left|right|displaystyle|[ ;:>])(?![A-Za-z])|[~&\u00a3\u20ac\u00a5]|</?\w+>")
SCIENTIFIC = re.compile(
    rf"({DECIMAL})\s*(?:\\times|\\cdot|\u00d7)\s*10\s*\^\s*(?:\{{\s*([-+]?[0-9]{{1,3}})\s*\}}|([0-9]))"
)
EQUAL = re.compile(r"=|\\approx|\u2248")
UNEQUAL = re.compile(r"[!<>]=|[<>]")
IN_BRACKETS = re.compile(r"\([^()]*\)")
SEVERAL = re.compile(r"[,;]|\b(?:or|and)\b")

POWER = r"\s*\^\s*(?:\{\s*[-+]?[0-9]\s*\}|[-+]?[0-9])"
LETTER_POWER = re.compile(rf"(?<=[^\W\d_]){POWER}")
UNIT_POWER = re.compile(rf"(?<=[0-9])(\s*[^\W\d_]+(?:\s*/\s*[^\W\d_]+)?){POWER}")
TOKEN = re.compile(r"[^\W\d_]+|\S")
UNITS = "mgshlLJNWVAKCF"  # single letters that are units; of the others are variables
FUNCTIONS = {"sqrt", "sin", "cos", "tan", "log", "ln", "exp", "abs", "mod", "pi"}
VARIABLES = re.compile("[u-zU-Z]+")
BESIDE = {"before": ",:.*`'\"([{", "after": ",:;.*`'\")]}/-([{"}
OF_FORMULA = r"\\(?:sqrt|pi|times|cdot|pm|mp|div|log|ln|sin|cos|tan|d?frac)"
PART_BEFORE = re.compile(rf"(?:[\^_]\s*\{{?|\\(?!boxed)[A-Za-z]+(?:\[[^\]]*\])?\s*\{{|{OF_FORMULA})\s*[-+]?\s*$")
PART_AFTER = re.compile(rf"\s*(?:\^|{OF_FORMULA}(?![A-Za-z]))")
NEAR = 60  # characters before a number that tell whether it is a part of a formula


def one_number(text: str) -> Fraction | None:
    """The number that the text is, None where it is a formula, several numbers, or none."""
    plain = LETTER_POWER.sub("", _plain(text))
    *left, right = EQUAL.split(plain)
    if UNEQUAL.search(plain) or any(SEVERAL.search(IN_BRACKETS.sub("", part)) for part in left):
        return None
    right = re.sub(r"^(\s*[-+])\s+(?=[0-9.])", r"\1", right)  # - 5
    found = list(NUMBER.finditer(right))
    if len(found) != 1:
        return None
    before, after = right[: found[0].start()], right[found[0].end() :]
    good = all(_may_stand(token, "before") for token in TOKEN.findall(before))
    return _value(found[0]) if good and all(_may_stand(token, "after") for token in TOKEN.findall(after)) else None


def last_number(text: str) -> Fraction | None:
    """None where there is none, or where the last is a part of a formula, such as of 2\\\\sqrt{3}."""
    plain = UNIT_POWER.sub(r"\1", _plain(text))
    found = list(NUMBER.finditer(plain))
    if not found:
        return None
    start, end = found[-1].span()
    if PART_BEFORE.search(plain[max(0, start - NEAR) : start]) or PART_AFTER.match(plain, end):
        return None
    return _value(found[-1])


def _may_stand(token: str, side: str) -> bool:
    """Whether it leaves a number beside it what it is: a word, a unit, a mark."""
    if not token[0].isalpha():
        return token in BESIDE[side]
    if len(token) == 1:
        return side == "after" and token in UNITS
    return token not in FUNCTIONS and not VARIABLES.fullmatch(token)


def _plain(text: str) -> str:
    """Without what only sets it: dollars, percents, thin spaces, texts in a formula, fractions as commands."""
    for before, after in PLAIN:
        text = text.replace(before, after)
    for _ in range(3):  # one in another
        text = TEXT.sub(_as_words, text)
    text = SPACES.sub(" ", DEGREE.sub(" degrees ", text))
    text = SCIENTIFIC.sub(lambda found: f"{found[1]}e{found[2] or found[3]}", text)

    def fraction(found: re.Match[str]) -> str:
        between = " " if text[: found.start()][-1:].isdigit() else ""  # 1\frac{3}{4}: a whole number and a fraction
        return f"{between}{found[1] or found[2]}/{found[3] or found[4]}"

    return FRAC.sub(fraction, text)


def _as_words(found: re.Match[str]) -> str:
    """A letter that is set as a text is a word and no variable."""
    return " " + re.sub(r"(?<![^\W_])[^\W\d_](?![^\W_])", "unit", found[1]) + " "


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > MOST_DIGITS:
        return None
    top, bottom = _decimal(found["top"]), _decimal(found["bottom"] or "1")
    if bottom == 0:
        return None
    value = Fraction(found["whole"] or 0) + top / bottom
    return -value if found["sign"] == "-" else value


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
