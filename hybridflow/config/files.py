"""Config files as trees of sections, and `section.key=value` overrides: the only reader of YAML beside `run`."""

import itertools
from pathlib import Path
from typing import Any

import yaml

from hybridflow.errors import ConfigError


def read_tree(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """What a config file says, with overrides applied; nothing of it is checked yet. Errors: ConfigError."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, this is {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b.0.c=value` in a tree of dicts and lists."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: expected section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error
    set_key(tree, keys, value, f"override {override!r}")


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
