"""Numbers in what a model writes: the one that a formula or a line is, and the last one of a text.

    one_number("x = 5\\\\text{ m}^2")    5
    one_number("2\\\\sqrt{3}")           None: a formula
    one_number("5 or 7")               None: two
    last_number("so 3 + 4 = 7 eggs")   7

Around the one number there may be words, units with their powers, currencies, brackets, and equations to the left.
"""

import re
from fractions import Fraction

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
