"""Pieces of Markdown."""

import re
from collections.abc import Iterable, Sequence

HEAD = "<!-- Written by `python docs/generate.py`: change the code that the page is read from. -->\n\n"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of all empty cells are left out."""
    cells = [[one.replace("|", "\\|").replace("\n", " ") for one in row] for row in rows]
    kept = [i for i in range(len(titles)) if any(row[i] for row in cells)]
    lines = [[titles[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: str) -> str:
    """As it is typed; nothing for an empty text."""
    return f"`{text}`" if text else ""


def listed(names: Iterable[str]) -> str:
    """`a`, `b`, `c`."""
    return ", ".join(map(code, names))


def plain(text: str) -> str:
    """A text that Markdown is to show as it stands. Underscores within words are no signs."""
    return re.sub(r"[\\*<]|(?<!\w)_|_(?!\w)", lambda sign: f"\\{sign[0]}", text)
