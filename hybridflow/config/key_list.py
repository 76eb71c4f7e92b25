"""All keys of both kinds of config as a person reads them: each once, with who has it where not all do. Pure.

entries("sampling.top_k")       [Entry("sampling.top_k", "integer >= 0", "0", ..., "Only with generation.")]
"""

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.fixed_algorithms import FIXED_ALGORITHMS
from hybridflow.config.keys import OWNERS, Key, keys_of
from hybridflow.config.messages import nearest
from hybridflow.errors import ConfigError

NAME = "algorithm.name"
WIDTH, INDENT = 112, " " * 4  # of descriptions in a terminal
MOST_SHOWN = 4  # keys that end as the given one
EVERY_ALGORITHM = {**ALGORITHMS, **FIXED_ALGORITHMS}


@dataclass(frozen=True)
class Entry:
    """A key. only: a sentence on who has it, "" where all have."""

    path: str
    kind: str
    default: str
    description: str
    only: str

    def text(self) -> str:
        """`key  type  default`, and below it the description."""
        head = "  ".join(part for part in (self.path, self.kind, self.default) if part)
        text = " ".join(part for part in (self.description, self.only) if part)
        return "\n".join([head, *textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)])


def entries(prefix: str = "") -> list[Entry]:
    """The key `prefix` and those below it, or all; without these what begins so, `checkpoint.save`.

    Errors: ConfigError where there is none.
    """
    wanted = re.sub(r"\.[0-9]+(?=\.|$)", ".0", prefix.strip("."))
    every = _without_repeats([_entry(keys) for keys in _same_keys()])
    found = [entry for entry in every if not wanted or f"{entry.path}.".startswith(f"{wanted}.")]
    if not found:
        found = [entry for entry in every if entry.path.startswith(wanted)]
    if not found:
        paths = list(dict.fromkeys(entry.path for entry in every))
        ending = [path for path in paths if path.endswith(f".{wanted}")]
        close = ending[:MOST_SHOWN] or [path for path in [nearest(wanted, paths)] if path]
        raise ConfigError(f"{prefix}: is no key" + (f"; did you mean {' or '.join(close)}?" if close else ""))
    return found


def _without_repeats(every: list[Entry]) -> list[Entry]:
    """The entries; a key does not repeat the owners that the section names."""
    said: dict[str, list[str]] = {}
    for entry in every:
        said.setdefault(entry.path, []).append(entry.only)

    def repeats(entry: Entry) -> bool:
        parts = entry.path.split(".")
        return any(said.get(".".join(parts[:count])) == [entry.only] for count in range(1, len(parts)))

    return [replace(entry, only="") if repeats(entry) else entry for entry in every]


def _same_keys() -> list[list[Key]]:
    """Keys with the same path, type and description together, section after section."""
    groups: dict[str, dict[tuple[str, ...], list[Key]]] = {}
    for tree in OWNERS:
        for key in keys_of(tree):
            same = (key.path,) if key.path == NAME else (key.path, key.kind, key.description)
            groups.setdefault(key.path.partition(".")[0], {}).setdefault(same, []).append(key)
    return [keys for section in groups.values() for keys in section.values()]


def _entry(keys: list[Key]) -> Entry:
    first = keys[0]
    if first.path == NAME:
        return Entry(NAME, " | ".join(EVERY_ALGORITHM), first.default, first.description, "")
    return Entry(first.path, first.kind, _defaults(keys), first.description, _owners([key.owner for key in keys]))


def _defaults(keys: Iterable[Key]) -> str:
    """The default that most have, and who has another: `clip; reinforce for rloo, opo`."""
    owners: dict[str, list[str]] = {}
    for key in keys:
        owners.setdefault(key.default, []).append(key.owner)
    most, *others = sorted(owners, key=lambda default: -len(owners[default]))
    return "; ".join([most, *(f"{default} for {', '.join(owners[default])}" for default in others)])


def _owners(owners: list[str]) -> str:
    have = set(owners)
    if have >= set(OWNERS.values()) or have == set(EVERY_ALGORITHM):
        return ""
    if have in ({"generation"}, set(ALGORITHMS)):
        return "Only with generation."
    if have in ({"fixed data"}, set(FIXED_ALGORITHMS)):
        return "Only on fixed data."
    return f"Only with {', '.join(owners)}."
