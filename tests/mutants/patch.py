"""A mutant: a fault of the package in words, and the patch that makes it."""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).with_name("patches")
Runs = dict[str, list[str]]  # FILE::FUNCTION -> the test files that run it
HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? ", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """`PATCHES`/NAME.patch: one line that says the fault, an empty line, and what `git diff` prints."""

    name: str
    fault: str
    diff: str

    @classmethod
    def of(cls, file: Path) -> "Mutant":
        fault, _, diff = file.read_text(encoding="utf-8").partition("\n\n")
        return cls(file.stem, fault, diff)

    @property
    def room(self) -> str:
        """What the fault is in: the first word of the name."""
        return self.name.partition("-")[0]

    @property
    def files(self) -> list[str]:
        """By their paths below the root."""
        return re.findall(r"^--- a/(.*)$", self.diff, re.MULTILINE)

    def problem(self, root: Path) -> str:
        """Why the patch cannot be applied to the tree below `root`; empty if it can."""
        return self._apply(root, "--check").strip()

    def put_into(self, root: Path) -> None:
        """Errors: ValueError where the patch cannot be applied."""
        if problem := self._apply(root):
            raise ValueError(f"{self.name}: {problem}")

    def functions(self, root: Path) -> list[str]:
        """FILE::FUNCTION of each function that the patch changes, of the tree without the fault."""
        found = []
        for part in re.split(r"(?m)^(?=--- a/)", self.diff)[1:]:
            file = part.partition("\n")[0].removeprefix("--- a/")
            changed = set(_changed_lines(part))
            found += [f"{file}::{name}" for name, lines in functions_of(root / file) if changed & set(lines)]
        return found

    def _apply(self, root: Path, *options: str) -> str:
        command = ["git", "apply", "--whitespace=nowarn", *options, "-"]
        done = subprocess.run(command, cwd=root, input=self.diff, capture_output=True, text=True, check=False)
        return done.stderr or f"git apply: status {done.returncode}" if done.returncode else ""


def mutants() -> list[Mutant]:
    return [Mutant.of(file) for file in sorted(PATCHES.glob("*.patch"))]


def functions_of(file: Path) -> Iterator[tuple[str, range]]:
    """(CLASS.FUNCTION, lines of the body), nested ones beside those around them."""
    yield from _functions(ast.parse(file.read_text(encoding="utf-8")), "")


def _functions(node: ast.AST, before: str) -> Iterator[tuple[str, range]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield before + child.name, range(child.body[0].lineno, (child.end_lineno or child.lineno) + 1)
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _functions(child, f"{before}{child.name}." if inside else before)


def _changed_lines(part: str) -> Iterator[int]:
    """Of the former file: those that are taken away, and those behind which something is put."""
    line = 0
    for text in part.split("\n")[2:]:
        if hunk := HUNK.match(text):
            line = int(hunk[1])
        elif text.startswith("+"):
            yield max(line - 1, 1)
        else:
            if text.startswith("-"):
                yield line
            line += 1
