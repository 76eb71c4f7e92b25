"""reference/refused-pairs.md: of hybridflow/config/refused_pairs.yaml, a table for each kind of section."""

from itertools import groupby

from docs.generator.markdown import HEAD, code, plain, table
from hybridflow.config.refused_pairs import KeyCondition, RefusedPair, refused_pairs

INTRODUCTION = """\
# Keys that do not go together

A config with both keys of a row is refused before a run starts. The message names both keys, their values and the
reason. `hybridflow plan CONFIG` gives the same message without any rank. [Config keys](config.md) explains each key.

Conditions are those that `hybridflow/config/refused_pairs.yaml` has:

| Condition | Meaning |
| --- | --- |
| `key` | The key has a value: not null, false, 0 or empty. |
| `no key` | The key has no value. |
| `key = a | b` | The key has one of these values. |
| `key != a | b` | The key has another value than these. |
| `key > 1` | The value is larger. |

`0` in a key stands for any place in a list, and NAME for a name of the user's. ROLE is `actor`, `critic`, `reference`,
`reward_model` or `reward.models.0`. Rules of sums, ranks and files are not in these tables.
"""
OF_RUNS = {
    "RunConfig": "All runs",
    "ExperimentConfig": "Runs that generate",
    "FixedDataConfig": "Runs on fixed data",
}


def page() -> str:
    parts = [HEAD + INTRODUCTION.replace(" | b`", " \\| b`")]
    for section, pairs in groupby(refused_pairs(), key=lambda pair: pair.section):
        rows = list(pairs)
        parts.append(f"\n## {_title(section, rows[0].place)}\n\n{table(('Key', 'With', 'Why'), map(_row, rows))}")
    return "".join(parts)


def _title(section: str, place: str) -> str:
    if not place:
        return OF_RUNS[section]
    return f"{code(place)} of {section.lower()}" if place == "algorithm" else code(place)


def _row(pair: RefusedPair) -> tuple[str, str, str]:
    one, other = (_side(side, pair.place) for side in pair.sides)
    where = "".join(f", where {code(each.text(pair.place))}" for each in pair.where)
    return one, other + where, plain(pair.reason)


def _side(side: tuple[KeyCondition, ...], place: str) -> str:
    return " or ".join(code(each.text(place)) for each in side)
