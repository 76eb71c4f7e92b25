"""table.md: which test finds which mutant."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.patch import Mutant

TABLE = Path(__file__).with_name("table.md")
HEAD = """\
# Mutants, and the tests that find them

`python -m tests.mutants run` writes the table: [how to add one](../../docs/extend/mutant.md).

| mutant | fault | set | found by |
| --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Killed:
    """By which test of which set; both empty where no test finds the mutant."""

    set: str
    test: str


def read_table(file: Path = TABLE) -> dict[str, Killed]:
    """By the mutant's name."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0] not in ("mutant", "---"):
            found[cells[0]] = Killed(cells[2], cells[3])
    return found


def written_table(mutants: Iterable[Mutant], table: Mapping[str, Killed]) -> str:
    """Rows of mutants that are no more are left out."""
    rows = ((mutant, table.get(mutant.name, Killed("", ""))) for mutant in mutants)
    lines = (f"| `{m.name}` | {m.fault} | {k.set} | {f'`{k.test}`' if k.test else ''} |\n" for m, k in rows)
    return HEAD + "".join(lines)
