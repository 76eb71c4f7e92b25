"""A config file as it is resolved, and how two differ. Pure.

resolved_tree("mine.yaml")["seed"]                       0
differences("a.yaml", "b.yaml")                     ["seed: 0 (default) -> 1"]
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from hybridflow.config.auto import AUTO, ENGINE, autos, with_neutral
from hybridflow.config.files import as_flow, read_tree, set_key
from hybridflow.config.kinds import AnyConfig, config_class
from hybridflow.config.section import Section

DEFAULT, ABSENT = " (default)", "absent"
Values = dict[str, tuple[str, bool]]


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[AnyConfig, list[str]]:
    """The config of either kind, and the keys that are `auto`, which hold a neutral value. Errors: ConfigError."""
    tree = read_tree(path, list(overrides))
    config = config_class(tree).from_tree(with_neutral(tree), path)
    sections = {name: "rollout" if name == ENGINE else name for name in autos(tree)}
    return config, [f"{sections[name]}.{key}" for name, keys in autos(tree).items() for key in keys]


def resolved_tree(path: str | Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The value of every key, `auto` where the file says so, and notes for a person. Errors: ConfigError."""
    config, free = read_config(path, overrides)
    tree = config.model_dump(mode="json")
    for key in free:
        set_key(tree, key.split("."), AUTO, key)
    return tree, config.notes


def differences(first: str | Path, second: str | Path) -> list[str]:
    """A line for each key that differs; of a section that one alone has, what is no default. Errors: ConfigError."""
    one, other = values(first), values(second)
    return [
        f"{key}: {_value_text(one.get(key))} -> {_value_text(other.get(key))}"
        for key in dict.fromkeys([*one, *other])
        if _differs(one.get(key), other.get(key))
    ]


def _value_text(value: tuple[str, bool] | None) -> str:
    return ABSENT if value is None else value[0] + (DEFAULT if value[1] else "")


def _differs(one: tuple[str, bool] | None, other: tuple[str, bool] | None) -> bool:
    if one is not None and other is not None:
        return one[0] != other[0]
    alone = one or other
    return alone is not None and not alone[1]


def values(path: str | Path) -> Values:
    """The value of each key of a config, and whether the value is the default. Errors: ConfigError."""
    config, free = read_config(path)
    return dict(_values(config, None, "")) | {key: (AUTO, False) for key in free}


def _values(section: Section, given: Section | None, prefix: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """The values of a section. given: where the defaults come from, if not from the section itself."""
    dumped = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        key, value, default = f"{prefix}{name}", getattr(section, name), _default(field, name, given)
        if isinstance(value, Section) and isinstance(dumped[name], dict):  # metrics.eval_reward may be a text
            yield from _values(value, default if type(default) is type(value) else None, f"{key}.")
        elif _is_list(value):
            for i, each in enumerate(value):
                yield from _values(each, None, f"{key}.{i}.")
        else:
            # a name is the default of one algorithm's section alone
            yield key, (as_flow(dumped[name]), key != "algorithm.name" and value == default)


def _default(field: FieldInfo, name: str, given: Section | None) -> object:
    return field.default if given is None else getattr(given, name)


def _is_list(value: object) -> bool:
    """Whether sections lie in a list there."""
    return isinstance(value, tuple) and bool(value) and all(isinstance(each, Section) for each in value)
