"""Pages of Markdown as the tests of documents read them: links, anchors, and fenced blocks with what a comment says.

A comment on the line above a block says what becomes of the block, and mkdocs and GitHub show nothing of it:

    <!-- run -->                    a bash block that tests/test_docs_runs.py executes
    <!-- file: my_rewards.py -->    a block whose text is that file, for the blocks that run after it
    <!-- not checked: REASON -->    a block that is no command line or config of ours
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
OF_ROOT = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "AGENTS", "SECURITY")]
PAGES = [*OF_ROOT, *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<said>[^\n]*?) -->\n\s*)?^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^[ ]*```[ ]*$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`(?!\]\()", re.DOTALL | re.MULTILINE)
APART = re.compile(r"^(?:#| *\||:::|!!!|\?\?\?|    ).*$|^ *(?=(?:[-*]|\d+\.) )", re.MULTILINE)  # no running text
KEYWORDS = {"do", "then", "else", "done", "fi", "for", "if", "while"}
BEFORE = {"sudo", "nice", "exec", "time", "!"}  # a command
ENDS = {";", "&&", "||", "|", "&", "(", ")", ";;", "|&"}
REDIRECTIONS = {">", ">>", "<", "2>", "&>", ">&", "<<"}


@dataclass(frozen=True)
class Block:
    """A fenced block. said: what the comment above it says; line: the first of its text, from 1."""

    page: Path
    language: str
    text: str
    said: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_checked(self) -> bool:
        return not self.said.startswith("not checked: ")

    @property
    def runs(self) -> bool:
        return self.said == "run"

    @property
    def file(self) -> str | None:
        return self.said.removeprefix("file: ") if self.said.startswith("file: ") else None


def blocks_of(page: Path, language: str | None = None) -> Iterator[Block]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        if language is None or match["language"] == language:
            shown = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            line = text.count("\n", 0, match.start("text")) + 1
            yield Block(page, match["language"], shown, match["said"] or "", line)


def links_of(page: Path) -> list[str]:
    """Targets of links and pictures outside of code."""
    return LINK.findall(CODE.sub("", page.read_text()))


def inline_code(page: Path) -> list[str]:
    """What stands between backticks within a line."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def anchors_of(page: Path) -> set[str]:
    """As mkdocs makes them of titles in docs/, and GitHub elsewhere; and those that a page gives itself."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set(re.findall(r"\{[^}\n]*#([\w.\-]+)[^}\n]*\}", text))
    found |= set(re.findall(r"^::: ([\w.]+)", text, flags=re.MULTILINE))
    for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        bare = re.sub(r"\{[^}]*\}\s*$", "", bare).strip()
        slug = re.sub(r"[^\w\s-]", "", bare).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", slug) if page.is_relative_to(DOCS) else slug.replace(" ", "-"))
    return found


def sentences_of(text: str) -> Iterator[str]:
    """Of running text, without code, tables, titles and the targets of links. Code within a line is one word.

    An item of a list begins a sentence, and so does what follows a colon.
    """
    text = re.sub(r"^ *```.*?^ *```.*?$|<!--.*?-->", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "CODE", LINK.sub(lambda link: link[0][1 : link[0].rindex("](")], text))
    for paragraph in re.split(r"\n\s*\n", APART.sub("\n\n", text)):
        yield from filter(None, re.split(r"(?<=[.!?:])[*)\"]*\s+", " ".join(paragraph.split())))


def num_words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


# ------------------------------------------------------------------------------------------------ command lines


def commands_of(text: str) -> list[list[str]]:
    """The words of each simple command of a shell script, without assignments, redirections and keywords."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        for words in _simple(_words(line)):
            if words := _bare(words):
                found.append(words)
    return found


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    return list(lexer)


def _simple(words: list[str]) -> Iterator[list[str]]:
    current: list[str] = []
    for word in words:
        if word in ENDS:
            yield current
            current = []
        else:
            current.append(word)
    yield current


def _bare(words: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in REDIRECTIONS:
            skip = True
        else:
            kept.append(word)
    if kept[:1] == ["$"]:
        kept = kept[1:]
    while kept and (kept[0] in KEYWORDS | BEFORE or re.match(r"[A-Za-z_]\w*=", kept[0])):
        if kept[0] == "for":
            return []
        kept = kept[1:]
    if kept[:1] == ["env"]:
        return _bare([word for word in kept[1:]])
    return kept
