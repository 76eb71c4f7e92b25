"""Every key of a config: type, default and description, read from the sections. Pure.

    next(keys_of(ExperimentConfig))     Key("name", "text", "required", "The name of the run. ...", "generation")

A key of a list of sections is the key of the first section: `reward.models.0.weight`. NAME stands for a name of the
user's: `data.heldout.NAME.samples`.
"""

import json
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hybridflow.config.experiment import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.section import Section

REQUIRED, SECTION = "required", "section"
Tree = type[ExperimentConfig] | type[FixedDataConfig]
OWNERS: dict[Tree, str] = {ExperimentConfig: "generation", FixedDataConfig: "fixed data"}
BOUNDS = {Gt: ">", Ge: ">=", Lt: "<", Le: "<="}
NAMES = {str: "text", int: "integer", float: "number", bool: "true | false", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One key. owner: the algorithm that has it, or the kind of run; default: as YAML has it, "" of a section."""

    path: str
    kind: str
    default: str
    description: str
    owner: str


def keys_of(tree: Tree) -> Iterator[Key]:
    """All keys of a kind of run, in the order of the sections; keys of `algorithm` once for each algorithm."""
    yield from _keys(tree, None, "", OWNERS[tree])


def _keys(section: type[Section], given: Section | None, prefix: str, owner: str) -> Iterator[Key]:
    """The keys of one section. given: where the defaults come from, if not from the section itself."""
    for name, field in section.model_fields.items():
        path, inner = f"{prefix}{name}", sections_in(field.annotation)
        default = field.get_default(call_default_factory=False) if given is None else getattr(given, name)
        if path == "algorithm":
            yield Key(path, SECTION, "" if default is not PydanticUndefined else REQUIRED, _text(field), owner)
            for each in inner:
                yield from _keys(each, None, "algorithm.", _name_of(each))
            continue
        yield Key(path, kind_of(field.annotation, field.metadata), _shown(default), _text(field), owner)
        for each in inner:
            inside = "0." if is_listed(each, field.annotation) else "NAME." * is_named(each, field.annotation)
            within = f"{path}.{inside}"
            yield from _keys(each, default if isinstance(default, each) else None, within, owner)


def _name_of(algorithm: type[Section]) -> str:
    return str(typing.get_args(algorithm.model_fields["name"].annotation)[0])


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _shown(default: Any) -> str:
    if default is PydanticUndefined:
        return REQUIRED
    if isinstance(default, BaseModel):
        return ""
    return default if isinstance(default, str) and default.isprintable() and default else json.dumps(default)


def sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """The section classes inside an annotation such as tuple[Section, ...] or Section | None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    inner = [each for argument in typing.get_args(annotation) for each in sections_in(argument)]
    return tuple(dict.fromkeys(inner))


def is_listed(section: type[Section], annotation: Any) -> bool:
    """Whether the section lies in a list there."""
    if typing.get_origin(annotation) is tuple:
        return section in sections_in(annotation)
    return any(is_listed(section, argument) for argument in typing.get_args(annotation))


def is_named(section: type[Section], annotation: Any) -> bool:
    """Whether the section is a value of a mapping there, by a name of the user's."""
    if typing.get_origin(annotation) is dict:
        return section in sections_in(annotation)
    return any(is_named(section, argument) for argument in typing.get_args(annotation))


# ------------------------------------------------------------------------------------------------ types


def kind_of(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type as a person reads it: `integer > 0 | null`, `a | b`, `list of text`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    read = [each.json_schema_input_type for each in metadata if isinstance(each, BeforeValidator)]
    if read and read[0] is not PydanticUndefined:  # what a file says, where the code has another type
        return kind_of(read[0])
    if origin is Annotated:
        return kind_of(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return " | ".join(json.dumps(value) if not isinstance(value, str) else value for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(kind_of(argument) for argument in arguments))
    if origin in (tuple, list):
        return f"list of {_plural(arguments)}"
    if origin is dict:
        return f"mapping of {kind_of(arguments[0])} to {kind_of(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return SECTION
    return NAMES.get(annotation, "any value") + _bounds(metadata)


def _plural(arguments: Sequence[Any]) -> str:
    if len(arguments) == 2 and arguments[-1] is not Ellipsis:
        return f"2: {kind_of(arguments[0])}"
    kind = kind_of(arguments[0]).replace(SECTION, "sections")
    return f"({kind})" if "|" in kind else kind


def _bounds(metadata: Iterable[Any]) -> str:
    """` > 0, <= 1` of a number."""
    found = []
    for each in metadata:
        for one in getattr(each, "metadata", [each]):
            found += [
                f"{sign} {getattr(one, kind.__name__.lower()):g}" for kind, sign in BOUNDS.items() if type(one) is kind
            ]
    return f" {', '.join(found)}" if found else ""
