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

FENCE = re.compile(r"(?P<before>.*?)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
NO_TEXT = re.compile(r"[ \t>]*(?:(?:[-*+]|[0-9]{1,3}[.)])[ \t]+)?")  # before a fence: margin, quote, mark of a list
LANGUAGE = re.compile(r"[\s{.]*([\w+#-]*)")
PYTHON = re.compile(r"(?:python|py)[0-9]*", re.IGNORECASE)
BEGUN = re.compile(r"(?:`{3,}|~{3,})[ \t]*(?:python|py)[0-9]*[ \t]*\n\s*\Z", re.IGNORECASE)  # by the prompt


@dataclass
class FencedBlock:
    """fence: that it begins with. margin: of that line. closed: it has an end."""

    fence: str
    margin: int
    language: str
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def text(self) -> str:
        return textwrap.dedent("".join(self.lines))

    @property
    def may_be_python(self) -> bool:
        """One without a language, or without an end, may be what a program prints, or words."""
        if not self.text.strip() or (self.language and PYTHON.fullmatch(self.language) is None):
            return False
        return (self.closed and bool(self.language)) or _does_something(self.text)


def program_in(response: str, prompt: str = "") -> str:
    """The last block of Python behind the thoughts; without one all of that. Nothing where a thought does not end."""
    begun = BEGUN.search(prompt)
    said = behind_thoughts(response)
    found = blocks((begun[0] if begun else "") + (said or ""))
    return next((block.text for block in reversed(found) if block.may_be_python), said or "")


def blocks(text: str) -> list[FencedBlock]:
    """In their order."""
    found = list[FencedBlock]()
    for line in text.splitlines(keepends=True):
        block = found[-1] if found and not found[-1].closed else None
        fence = FENCE.fullmatch(line.rstrip())
        if block is None:
            if fence is not None and _begins(fence):
                found.append(_block(fence))
            continue
        if fence is None or not fence["fence"].startswith(block.fence) or not _ends(fence, block):
            block.lines.append(line)
            continue
        block.closed = True
        block.lines += [fence["before"] + "\n"] if fence["before"].strip() else []
        if _is_language(fence["info"]):
            found.append(_block(fence))
    return found


def _block(fence: re.Match[str]) -> FencedBlock:
    language = LANGUAGE.match(fence["info"])
    assert language is not None, "it matches no characters too"
    return FencedBlock(fence["fence"], len(fence["before"]), language[1])


def _begins(fence: re.Match[str]) -> bool:
    """At the beginning of a line with whatever behind it; behind words with a language at most."""
    return NO_TEXT.fullmatch(fence["before"]) is not None or (
        fence["fence"][0] == "`" and (not fence["info"] or _is_language(fence["info"]))
    )


def _ends(fence: re.Match[str], block: FencedBlock) -> bool:
    """Not deep within the text of a program; behind the last statement with nothing behind the fence."""
    if fence["before"].strip():
        return fence["fence"] == block.fence and fence["fence"][0] == "`" and not fence["info"]
    return len(fence["before"]) <= block.margin + 3


def _is_language(info: str) -> bool:
    return re.fullmatch(r"[ \t]*[A-Za-z][\w+#.:-]*", info) is not None


def _does_something(text: str) -> bool:
    """Whether it is Python with a statement or a call, and not what a program has printed."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        not isinstance(part, ast.Expr) or any(isinstance(node, ast.Call) for node in ast.walk(part)) for part in body
    )
