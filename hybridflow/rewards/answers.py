"""The answer in a response, for votes among several: what the judge of a run would read.

read, described = answer_reader("hybridflow.rewards:numeric_match")
read("... #### 1,234")                       # Fraction(1234)
"""

from collections.abc import Callable, Hashable

from hybridflow.rewards.gym import answer_in
from hybridflow.rewards.numeric import boxed, number_in

AnswerReader = Callable[[str], Hashable | None]  # None: the response has no answer
OF_TEXT = "the text of the response"


def answer_reader(function: str | None) -> tuple[AnswerReader, str]:
    """How answers are read where this function judges, and that in words. None: none alone does."""
    readers: dict[str, tuple[AnswerReader, str]] = {
        "hybridflow.rewards:numeric_match": (number_in, "the number of the response"),
        "hybridflow.rewards:math_equal": (_boxed_or_number, "what the response boxes, else the last number"),
        "hybridflow.rewards:reasoning_gym": (_tagged, "the text within <answer>"),
    }
    return readers.get(function or "", (_text, OF_TEXT))


def _boxed_or_number(response: str) -> Hashable | None:
    found = boxed(response)
    return number_in(response) if found is None else found.strip()


def _tagged(response: str) -> str | None:
    return answer_in(response, tagged=True)


def _text(response: str) -> str | None:
    return response.strip() or None
