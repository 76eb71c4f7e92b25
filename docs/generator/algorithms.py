"""reference/algorithms.md: what each algorithm is, the models it needs, and its keys with their defaults there."""

import inspect
import re
from collections.abc import Mapping

from docs.generator.markdown import HEAD, code, listed, plain, table
from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.fixed_algorithms import FIXED_ALGORITHMS
from hybridflow.config.keys import OWNERS, SECTION, Key, keys_of
from hybridflow.config.section import Section

INTRODUCTION = """\
# Algorithms and their keys

`algorithm.name` chooses the algorithm. A key that an algorithm does not have is an error. The section of a model that
an algorithm does not use is an error too. `hybridflow config init NAME` prints a whole config.

"""
SHARED = ("policy", "kl", "update")
SHARED_TEXT = """
## Parts that algorithms share { #shared-parts }

The keys of `policy`, `kl` and `update` mean the same in every algorithm. [Config keys](config.md#algorithm) has their
types and meanings. The tables below have the defaults of each algorithm.

"""


def page() -> str:
    every = {**ALGORITHMS, **FIXED_ALGORITHMS}
    rows = [(f"[`{name}`](#{name})", _summary(each), _roles(name, each)) for name, each in every.items()]
    keys = _keys()
    shared = "".join(f"### {part}\n\n{_matrix(part, keys)}\n" for part in SHARED)
    return (
        HEAD
        + INTRODUCTION
        + table(("Algorithm", "What it is", "Models"), rows)
        + "".join(_section(name, each, keys[name]) for name, each in every.items())
        + SHARED_TEXT
        + shared.rstrip("\n")
        + "\n"
    )


def _keys() -> dict[str, list[Key]]:
    """The keys of each algorithm, without `algorithm.`"""
    found: dict[str, list[Key]] = {}
    for tree in OWNERS:
        for key in keys_of(tree):
            if key.path.startswith("algorithm."):
                found.setdefault(key.owner, []).append(key)
    return found


def _section(name: str, algorithm: type[Section], keys: list[Key]) -> str:
    own = [key for key in keys if _part(key) not in (*SHARED, "name")]
    said = plain(inspect.getdoc(algorithm) or "")
    text = f"\n## {name} {{ #{name} }}\n\n{said}\n\nModels: {_roles(name, algorithm)}.\n"
    if own:
        rows = [(f"[`{_short(key)}`](config.md#{key.path})", code(key.default), plain(key.description)) for key in own]
        text += "\n" + table(("Key", "Default", "Meaning"), rows)
    has = [part for part in SHARED if part in algorithm.model_fields]
    return text + (f"\nShared parts: {', '.join(f'[`{part}`](#{part})' for part in has)}.\n" if has else "")


def _matrix(part: str, keys: Mapping[str, list[Key]]) -> str:
    """A row a key: its default, and which algorithms have another."""
    defaults: dict[str, dict[str, list[str]]] = {}
    for name, found in keys.items():
        for key in found:
            if _part(key) == part and key.kind != SECTION and _short(key) != part:
                defaults.setdefault(_short(key), {}).setdefault(key.default, []).append(name)
    rows = []
    for short, values in defaults.items():
        most, *others = sorted(values, key=lambda value: -len(values[value]))
        told = "; ".join(f"{code(value)}: {listed(values[value])}" for value in others)
        rows.append((f"[`{short}`](config.md#algorithm.{short})", code(most), told))
    return table(("Key", "Default", "Other defaults"), rows)


def _part(key: Key) -> str:
    return key.path.split(".")[1]


def _short(key: Key) -> str:
    return key.path.removeprefix("algorithm.")


def _summary(algorithm: type[Section]) -> str:
    """The first sentence."""
    text = " ".join((inspect.getdoc(algorithm) or "").split())
    return plain(re.split(r"(?<=[a-z)\]0-9])[.:](?:\s|$)", text, maxsplit=1)[0] + ".")


def _roles(name: str, algorithm: type[Section]) -> str:
    if name == "custom":
        return "those that `roles` names, `actor` among them"
    needs: frozenset[str] = algorithm().needs()  # type: ignore[attr-defined]
    order = ("actor", "critic", "reference", "reward", "reward_model")
    shown = [code(role) for role in order if role in needs]
    kl = algorithm.model_fields.get("kl")
    if kl is not None and name != "distill":
        uses = getattr(kl.annotation, "model_fields", {})["use"].annotation
        if "none" in getattr(uses, "__args__", ()):
            if "reference" in needs:
                shown = [f"{role} unless `kl.use` is `none`" if role == "`reference`" else role for role in shown]
            elif name != "opo":
                shown.append("`reference` where `kl.use` is not `none`")
    return ", ".join(shown)
