"""What a model has written while it thinks: no call of a tool, though it may look like one.

hidden = Thinking.hidden("so <tool_call>...</tool_call> or not</think>I call nothing", "<tool_call>")
hidden.text                     # the thoughts are a word each
hidden.shown(text)              # such words in a text are thoughts again
"""

import re
from dataclasses import dataclass

# of models that think, as their templates and vLLM's reasoning parsers have them
TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought\n", "<channel|>"),
)
WORD = "hybridflowthought{}z"  # of letters alone: no parser reads it as anything, and JSON has it as it is


@dataclass(frozen=True)
class Thinking:
    """text: with a word in the place of each thought. thoughts: in their order."""

    text: str
    thoughts: tuple[str, ...]

    @classmethod
    def hidden(cls, text: str, call: str, before: str = "") -> "Thinking":
        """call: how a call begins, nothing where that is not known. before: the end of what the text goes on from."""
        thoughts: list[str] = []

        def word(found: re.Match[str]) -> str:
            thoughts.append(found[0])
            return WORD.format(len(thoughts) - 1)

        for opening, closing in TAGS:
            text = _outside(text, opening, closing, call, begun=_is_open(before, opening, closing)).sub(word, text)
        return cls(text, tuple(thoughts))

    def shown(self, text: str) -> str:
        for number in reversed(range(len(self.thoughts))):  # a thought may have words of other tags' thoughts
            text = text.replace(WORD.format(number), self.thoughts[number])
        return text


def _is_open(before: str, opening: str, closing: str) -> bool:
    """Whether a text ends within a thought."""
    return before.rfind(opening) > before.rfind(closing)


def _outside(text: str, opening: str, closing: str, call: str, *, begun: bool) -> re.Pattern[str]:
    """Of thoughts: whole ones, one that the prompt has begun, and one that does not end, where no call comes before."""
    first, last = re.escape(opening), re.escape(closing)
    patterns = [rf"{first}.*?{last}"]
    end, start = text.find(closing), text.find(opening)
    if begun and end < 0:
        patterns = [r"\A.*\Z"]
    elif begun and (start < 0 or end < start):
        patterns.insert(0, rf"\A.*?{last}")
    unclosed = text.rfind(opening)
    place = text.find(call) if call else -1
    if unclosed > text.rfind(closing) and not 0 <= place < unclosed:
        patterns.append(rf"{first}.*\Z")
    return re.compile("|".join(patterns), re.DOTALL)


def behind_thoughts(text: str) -> str | None:
    """What a model says once it has thought; the prompt may have begun the thought. None: a thought does not end."""
    # <|end|> and the like also end what is no thought
    for opening, closing in TAGS:
        start = text.rfind(opening)
        names_thought = "think" in closing.lower() or "thought" in closing
        end = text.rfind(closing) if start >= 0 or names_thought else -1
        if start > end:
            return None
        text = text[end + len(closing) :] if end >= 0 else text
    return text
