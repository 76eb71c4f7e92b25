"""Config files as trees of sections, and `section.key=value` overrides: the only reader of YAML beside `run`.

A config may build on one other file:

    base: quickstart_grpo.yaml           # counted from the directory of this file, or from the working directory
    name: my_run
    algorithm: {name: dr_grpo}           # another name: the section of the base is replaced as a whole
    reference: null                      # replaces the section

Mappings merge by key; everything else replaces what the base says: lists, null and the empty mapping {}. A section
`algorithm` of another name than the base's replaces that section, since their keys differ; a base's section without a
name is ppo's. A base has no other base. Overrides come last. The working directory counts for a config from a pipe.
"""

import functools
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridflow.errors import ConfigError

BASE = "base"
MERGE = "tag:yaml.org,2002:merge"  # of the key <<, which may stand more than once


def read_tree(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """The tree of a config file, base merged in, overrides applied. No key is checked. Errors: ConfigError."""
    tree = _read_file(Path(path))
    base = tree.pop(BASE, None)
    if base is not None:
        tree = _merged(_read_base(Path(path), base), tree)
    for override in overrides:
        _apply_override(tree, override)
    return tree


def base_file(path: str | Path) -> Path | None:
    """The file that a config builds on. Errors: ConfigError where the config cannot be read."""
    base = _read_file(Path(path)).get(BASE)
    return _base_file(Path(path), base) if isinstance(base, str) else None


def is_lasting(path: str | Path) -> bool:
    """Whether every process that opens the path reads the same: no pipe, and no open file of this process."""
    return os.path.isfile(path) and not str(path).startswith(("/dev/", "/proc/"))


def _base_file(path: Path, base: str) -> Path:
    return (path.parent if is_lasting(path) else Path.cwd()) / Path(base).expanduser()


@functools.cache
def _text_of_pipe(path: Path) -> str:
    """A pipe gives the text once, and a config is read several times."""
    return path.read_text(encoding="utf-8")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = _text_of_pipe(path) if path.exists() and not is_lasting(path) else path.read_text(encoding="utf-8")
        tree = _loaded(text, str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # also of bytes that are no UTF-8
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, this is {type(tree).__name__}")
    return tree


def _read_base(path: Path, base: object) -> dict[str, Any]:
    """What the base of the config `path` says. Errors: ConfigError that names both files."""
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base = {base!r}: a base is the path of one file")
    file = _base_file(path, base)
    try:
        tree = _read_file(file)
    except ConfigError as error:
        raise ConfigError(f"{path}: base = {base}: {error}") from error
    if tree.get(BASE) is not None:
        raise ConfigError(f"{path}: base = {base}: {file} has a base itself, {tree[BASE]}: a base has none")
    return tree


def _merged(base: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """The base, where a config's values replace the base's: mappings by key, anything else as a whole."""
    found = dict(base)
    for key, value in tree.items():
        own = found.get(key)
        if (
            isinstance(own, dict)
            and isinstance(value, dict)
            and value
            and (key != "algorithm" or _same_name(own, value))
        ):
            found[key] = _merged(own, value)
        else:
            found[key] = value
    return found


def _same_name(base: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    own = base.get("name", "ppo")
    return bool(value.get("name", own) == own)


def as_yaml(tree: object) -> str:
    """A tree as YAML, keys in their order."""
    return yaml.safe_dump(tree, sort_keys=False)


def as_flow(value: object) -> str:
    """A value as YAML in one line, `[1, 2]`."""
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b.0.c=value` in a tree of dicts and lists."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: expected section.key=value")
    if keys == [BASE]:
        raise ConfigError(f"override {override!r}: base is a key of config files only")
    set_key(tree, keys, read_value(text, f"override {override!r}"), f"override {override!r}")


def read_value(text: str, source: str) -> Any:
    """What a YAML value says, from `source`. Errors: ConfigError where it is none."""
    try:
        return _loaded(text, source)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: the value is not YAML: {error}") from error


def _loaded(text: str, source: str) -> Any:
    """What a YAML text says. Errors: YAMLError, ValueError; ConfigError where a key stands twice in one mapping."""
    loader = yaml.SafeLoader(text)
    try:
        document = loader.get_single_node()
        if document is None:
            return None
        _check_keys(document, loader, source)
        return loader.construct_document(document)
    finally:
        loader.dispose()


def _check_keys(document: yaml.Node, loader: yaml.SafeLoader, source: str) -> None:
    """PyYAML takes the last of equal keys without a word. Errors: ConfigError with the key and both lines."""
    left, seen = [(document, "")], set[int]()
    while left:
        node, path = left.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue  # an alias stands for a node that is known
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += [(item, f"{path}{place}.") for place, item in enumerate(node.value)]
            continue
        lines: dict[object, int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                name, line = loader.construct_object(key), key.start_mark.line + 1
                if name in lines:
                    where = f"line {line}" if line == lines[name] else f"lines {lines[name]} and {line}"
                    raise ConfigError(f"{source}: {path}{key.value} stands twice, in {where}: a key has one value")
                lines[name] = line
            left.append((value, f"{path}{key.value}."))


def set_key(tree: dict[str, Any], keys: list[str], value: Any, source: str) -> None:
    """Set a.b.0.c, for the keys a, b, 0, c, in a tree of dicts and lists. Errors: ConfigError, from `source`."""
    node: Any = tree
    for key, following in itertools.pairwise(keys):
        node = _descend(node, key, source, default=[] if following == "0" else {})
    node[_slot(node, keys[-1], source)] = value


def _descend(node: Any, key: str, source: str, *, default: Any) -> Any:
    """The dict or list at `key` of a dict or list; `default` is put there where there is none."""
    slot = _slot(node, key, source)
    if node[slot] is None:
        node[slot] = default
    if not isinstance(node[slot], dict | list):
        raise ConfigError(f"{source}: {key!r} is {node[slot]!r}, not a section")
    return node[slot]


def _slot(node: Any, key: str, source: str) -> int | str:
    """What `key` stands for in a dict or list, which gets an empty entry there if it has none."""
    if isinstance(node, dict):
        node.setdefault(key)
        return key
    if not key.isdecimal() or int(key) > len(node):
        raise ConfigError(f"{source}: {key!r} is no index of a list of {len(node)}")
    if int(key) == len(node):
        node.append(None)
    return int(key)
