"""The program in a response: the last fenced block of Python, of blocks as Markdown has them and models write them.

A block ends at a fence of the same character that is as long or longer, and has no language. A fence with a language
in a block begins the next one: the first was not closed. Models also begin a block behind words, and end one behind the
last statement.
"""

import ast
import re
import textwrap
from dataclasses import dataclass, field

from hybridflow.rollout.thinking import behind_thoughts

# all of a run of marks, which is tried once: a line of 30,000 marks would take minutes
MARKS = r"(?<!`)`{3,}+|(?<!~)~{3,}+"
FENCE = re.compile(rf"(?P<before>.*?)(?P<fence>{MARKS})(?P<info>[\s{{.]*+(?P<language>[\w+#-]*+)[^`]*)")
NO_TEXT = re.compile(r"[ \t>]*(?:(?:[-*+]|[0-9]{1,3}[.)])[ \t]+)?")  # before a fence: margin, quote, mark of a list
LANGUAGE = re.compile(r"[ \t]*[A-Za-z][\w+#.:-]*")
PYTHON = re.compile(r"(?:python|py)[0-9]*", re.IGNORECASE)
BEGUN = re.compile(r"(?:`{3,}|~{3,})[ \t]*(?:python|py)[0-9]*[ \t]*\n\s*\Z", re.IGNORECASE)  # by the prompt


@dataclass
class FencedBlock:
    begin: re.Match[str]
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def text(self) -> str:
        return textwrap.dedent("".join(self.lines))

    @property
    def may_be_python(self) -> bool:
        """One without a language, or without an end, may be what a program prints, or words."""
        language = self.begin["language"]
        if not self.text.strip() or (language and not PYTHON.fullmatch(language)):
            return False
        return (self.closed and language != "") or _does_something(self.text)


def program_in(response: str, prompt: str = "") -> str:
    """The last block of Python behind the thoughts; without one all of that. Nothing where a thought does not end."""
    begun = BEGUN.search(prompt)
    said = behind_thoughts(response) or ""
    found = _blocks((begun[0] if begun else "") + said)
    return next((block.text for block in reversed(found) if block.may_be_python), said)


def _blocks(text: str) -> list[FencedBlock]:
    """In their order."""
    found = list[FencedBlock]()
    for line in text.splitlines(keepends=True):
        block = found[-1] if found and not found[-1].closed else None
        fence = FENCE.fullmatch(line.rstrip())
        if block and not (fence and _ends(fence, block.begin)):
            block.lines.append(line)
        elif fence and block:
            block.closed = True
            block.lines += [fence["before"] + "\n"] if fence["before"].strip() else []
            found += [FencedBlock(fence)] if LANGUAGE.fullmatch(fence["info"]) else []
        elif fence and _begins(fence):
            found.append(FencedBlock(fence))
    return found


def _begins(fence: re.Match[str]) -> bool:
    """At the beginning of a line with whatever behind it; behind words with a language at most."""
    bare = fence["fence"][0] == "`" and (not fence["info"] or LANGUAGE.fullmatch(fence["info"]))
    return bool(bare or NO_TEXT.fullmatch(fence["before"]))


def _ends(fence: re.Match[str], begin: re.Match[str]) -> bool:
    """Not deep within the text of a program; behind the last statement with nothing behind the fence."""
    if fence["before"].strip():
        return fence["fence"] == begin["fence"] and fence["fence"][0] == "`" and not fence["info"]
    return fence["fence"].startswith(begin["fence"]) and len(fence["before"]) <= len(begin["before"]) + 3


def _does_something(text: str) -> bool:
    """Whether it is Python with a statement or a call, and not what a program has printed."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        not isinstance(part, ast.Expr) or any(isinstance(node, ast.Call) for node in ast.walk(part)) for part in body
    )
