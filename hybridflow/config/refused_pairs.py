"""Pairs of keys that do not go together: reads refused_pairs.yaml, and says which pair a section has.

    refusal(section)     "kind = gspo cannot go with loss_mean = token_mean: every token has the loss of ...", or None

`Section` asks when it is made. The manual's page and the editor's schema are made of `refused_pairs`.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hybridflow.config.files import as_flow, read_tree
from hybridflow.errors import Mendable

NAMED = re.compile(r"\w=\w")  # in a reason: a key with the value to set


@dataclass(frozen=True)
class KeyCondition:
    """On the value of one key. sign: `=`, `!=`, `>`, `no`, or empty where any value will do."""

    key: str
    sign: str = ""
    values: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        match self.sign:
            case "no":
                return not value
            case "=":
                return value in self.values
            case "!=":
                return value not in self.values
            case ">":
                return bool(value > self.values[0])
        return bool(value)

    def met_by(self, section: object) -> list[str]:
        """`key = value` of each key that meets the condition: several where the key is in a list."""
        found = _values(section, self.key.split("."))
        return [_shown(key, value) for key, value in found if self.holds(value)]

    def text(self, place: str) -> str:
        """As the file has it, with the key as the user types it."""
        key = ".".join(part for part in (place, self.key) if part)
        if self.sign in ("", "no"):
            return f"{self.sign} {key}".strip()
        return f"{key} {self.sign} {' | '.join(map(as_flow, self.values))}"


@dataclass(frozen=True)
class RefusedPair:
    """section: the name of the class. place: of the section in a config, empty at the top. sides: any of each."""

    section: str
    place: str
    sides: tuple[tuple[KeyCondition, ...], tuple[KeyCondition, ...]]
    reason: str
    where: tuple[KeyCondition, ...]


@functools.cache
def refused_pairs() -> tuple[RefusedPair, ...]:
    """All of the file, in its order."""
    found = []
    for title, rows in read_tree(Path(__file__).with_suffix(".yaml")).items():
        section, place = title.split(" at ")
        for one, other, reason, *where in rows:
            sides = _conditions(one), _conditions(other)
            found.append(RefusedPair(section, place.replace("the top", ""), sides, reason, _conditions(where)))
    return tuple(found)


@functools.cache
def pairs_of(section: type[BaseModel]) -> tuple[RefusedPair, ...]:
    """Those of a class of section and of the class's bases."""
    names = {each.__name__ for each in section.__mro__}
    return tuple(pair for pair in refused_pairs() if pair.section in names)


def refusal(section: BaseModel) -> Mendable | None:
    """The first pair that the section has, with what is wrong; None where all keys go together."""
    for pair in pairs_of(type(section)):
        one, other = ([key for each in side for key in each.met_by(section)] for side in pair.sides)
        if one and other and all(each.met_by(section) for each in pair.where):
            why = f"{', '.join(one)} cannot go with {', '.join(other)}: {pair.reason}"
            return Mendable(why, {} if NAMED.search(pair.reason) else _settings(pair, section))
    return None


def _settings(pair: RefusedPair, section: BaseModel) -> dict[str, list[Any]]:
    """For `remedy`: defaults by which one side of the pair is no longer met, of the sides that one key meets."""
    found: dict[str, list[Any]] = {}
    for side in pair.sides:
        met = [
            (key, condition)
            for condition in side
            for key, value in _values(section, condition.key.split("."))
            if condition.holds(value)
        ]
        if len(met) == 1:
            [(key, condition)] = met
            found[key] = [default for default in _default(section, key.split(".")) if not condition.holds(default)]
    return found


def _default(section: BaseModel, path: Sequence[str]) -> list[Any]:
    """The default of a key, if the key has one that is no section."""
    node: Any = section
    for part in path[:-1]:
        node = node[int(part)] if part.isdecimal() else getattr(node, part)
    fields: Mapping[str, Any] = getattr(type(node), "model_fields", {})
    found = [field for name, field in fields.items() if path[-1] in (name, field.alias) and not field.is_required()]
    defaults = [field.get_default(call_default_factory=True) for field in found]
    return [default for default in defaults if not isinstance(default, BaseModel | dict)]


def _conditions(given: str | Sequence[str]) -> tuple[KeyCondition, ...]:
    return tuple(_condition(text) for text in ([given] if isinstance(given, str) else given))


def _condition(text: str) -> KeyCondition:
    if with_values := re.fullmatch(r"(\S+) (=|!=|>) (.+)", text):
        key, sign, values = with_values.groups()
        return KeyCondition(key, sign, tuple(map(_value, values.split(" | "))))
    return KeyCondition(text.removeprefix("no "), "no" if text.startswith("no ") else "")


def _value(text: str) -> Any:
    """A number, true, false, null, or a text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _values(node: Any, path: Sequence[str], above: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) at the path, each of a list for a 0; none where a section on the way is not there."""
    if not path:
        yield above, node
        return
    name, *rest = path
    if name == "0":
        inner: Mapping[str, Any] = {str(place): each for place, each in enumerate(node)}
    elif isinstance(node, Mapping):
        inner = {name: node[name]} if name in node else {}
    else:
        inner = {name: getattr(node, name)} if hasattr(node, name) else {}
    for key, value in inner.items():
        yield from _values(value, rest, f"{above}.{key}".lstrip("."))


def _shown(key: str, value: Any) -> str:
    """Of sections the key alone."""
    listed = isinstance(value, tuple) and any(isinstance(each, BaseModel) for each in value)
    return key if listed or isinstance(value, BaseModel) else f"{key} = {as_flow(value)}"
