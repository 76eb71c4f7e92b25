"""reference/config.md: every key of configs, from the sections, each with an anchor: config.md#actor.optimizer.lr."""

from itertools import groupby

from docs.generator.markdown import HEAD, code, plain
from hybridflow.config.key_list import NAME, Entry, entries

INTRODUCTION = """\
# Config keys

A config is a YAML file. Each key below has its type, its default and its meaning. `hybridflow config keys` prints the
same list, and `hybridflow config keys reward.models` a part of it. A key of a list has a number:
`reward.models.0.weight` is a key of the first reward model. [`base`](#base) is the one key that the list leaves out.
Some [keys do not go together](refused-pairs.md).

"""
BASE = """
## base { #base }

`base: other.yaml` names a config to build on. The path counts from the directory of the file that has the key. Mappings
merge key by key. Every other value replaces the value of the base, lists and null included. A section `algorithm` of
another name replaces the section of the base. A base has no base of its own. `hybridflow config show FILE` prints the
result.
"""
TOP = "run"  # keys beside the sections


def page() -> str:
    """The keys in the order of the sections; what several algorithms call alike stands together."""
    every = entries()
    sections = {entry.path for entry in every if any(other.path.startswith(f"{entry.path}.") for other in every)}
    top = [entry for entry in every if "." not in entry.path and entry.path not in sections]
    text = HEAD + INTRODUCTION + f"## {TOP} {{ #{TOP} }}\n\nKeys beside the sections.\n"
    text += "".join(_entry(same) for _, same in _merged(top))
    nested = [entry for entry in every if entry not in top]
    for name, group in groupby(nested, key=lambda entry: entry.path.partition(".")[0]):
        text += f"\n## {name} {{ #{name} }}\n" + "".join(
            _about(same) if path == name else _entry(same) for path, same in _merged(list(group))
        )
    return text + BASE


def _merged(found: list[Entry]) -> list[tuple[str, list[Entry]]]:
    """Entries of one path together, where it comes first."""
    paths: dict[str, list[Entry]] = {}
    for entry in found:
        paths.setdefault(entry.path, []).append(entry)
    return list(paths.items())


def _about(same: list[Entry]) -> str:
    """Of a section: what it is for."""
    return "".join(f"\n{_text(entry)}{_nullable(entry)}\n" for entry in same)


def _nullable(entry: Entry) -> str:
    return {"": "", "required": " Required."}.get(entry.default, f" Default: `{entry.default}`.")


def _entry(same: list[Entry]) -> str:
    path = same[0].path
    return f"\n#### `{path}` {{ #{path} }}\n" + "".join(f"\n{_facts(entry)}<br>\n{_text(entry)}\n" for entry in same)


def _facts(entry: Entry) -> str:
    """Type and default in one line."""
    kind = ", ".join(map(code, entry.kind.split(" | "))) if entry.path == NAME else code(entry.kind)
    return (
        kind
        + (f" · default {code(entry.default)}" if entry.default not in ("", "required") else "")
        + (" · required" if entry.default == "required" else "")
    )


def _text(entry: Entry) -> str:
    return " ".join(plain(part) for part in (entry.description, entry.only) if part)
