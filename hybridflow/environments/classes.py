"""Finding a user's environment class and checking it, in a process that ends: the trainer imports no user's module.

    found = described("my_envs:Calculator", {"digits": 3})
    found.schemas                       # of the tools, as a chat template takes them

Run as a process by `rewards.probe.asked`, which reads one line of JSON and answers with one.
"""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import ConfigError, UserCodeError
from hybridflow.rewards.probe import asked, serve
from hybridflow.user_code import load_function


@dataclass(frozen=True)
class DescribedClass:
    """schemas: of the tools, in their order. file: of the class's module."""

    schemas: tuple[dict[str, Any], ...]
    file: str | None


def described(path: str, arguments: Mapping[str, Any]) -> DescribedClass:
    """Errors: ConfigError where there is no such class, or it is no environment."""
    [found] = asked("hybridflow.environments.classes", [[path, dict(arguments)]], field_of(path))
    if found["problem"]:
        raise ConfigError(found["problem"])
    return DescribedClass(tuple(found["schemas"]), found["file"])


def field_of(path: str) -> str:
    """What messages call it."""
    return f"data.environment.class = {path}"


def load_class(path: str) -> Any:
    """Errors: ConfigError where there is none, or it is no class."""
    try:
        found: Any = load_function(path, "data.environment.class")
    except UserCodeError as error:
        raise ConfigError(str(error)) from error
    if not inspect.isclass(found):
        raise ConfigError(f"{field_of(path)}: is a {type(found).__name__}, no class")
    return found


def tool_names(found: Any, path: str) -> tuple[str, ...]:
    """Errors: ConfigError unless `tools` is a sequence of names."""
    names = getattr(found, "tools", ())
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{field_of(path)}: tools = {names!r}: expected names of methods, such as ('add',)")
    return tuple(names)


def main(parent: int) -> None:
    """The process. See `rewards.probe`."""
    serve(parent, _told)


def _told(path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = load_class(path)
        _check_methods(found, path)
        _check_arguments(found, path, arguments)
        schemas = [_schema(found, path, name) for name in tool_names(found, path)]
    except ConfigError as error:
        return {"problem": str(error)}
    return {"problem": "", "schemas": schemas, "file": getattr(sys.modules[found.__module__], "__file__", None)}


def _check_methods(found: Any, path: str) -> None:
    for name, given in (("start", "row"), ("step", "said")):
        method = getattr(found, name, None)
        if not callable(method):
            raise ConfigError(f"{field_of(path)}: has no method {name}(self, {given}), which every environment needs")
        if inspect.iscoroutinefunction(method):
            raise ConfigError(f"{field_of(path)}: {name} is an `async def`; methods of environments are plain ones")
        try:
            inspect.signature(method).bind(None, None)
        except TypeError as error:
            raise ConfigError(f"{field_of(path)}: {name} is called as {name}(self, {given}): {error}") from error


def _check_arguments(found: Any, path: str, arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "none"
        raise ConfigError(
            f"{field_of(path)}: {error}; data.environment.arguments gives {given}; its signature is "
            f"{inspect.signature(found)}"
        ) from error
    except ValueError:  # of a class that is written in C: it will tell when it is called
        return


def _schema(found: Any, path: str, name: str) -> dict[str, Any]:
    """Of a tool, from types and docstring. Errors: ConfigError naming the tool."""
    method = getattr(found, name, None)
    if not callable(method):
        raise ConfigError(f"{field_of(path)}: tools names {name!r}, which is no method of the class")
    if inspect.iscoroutinefunction(method):
        raise ConfigError(
            f"{field_of(path)}: the tool {name} is an `async def`; methods of environments are plain ones"
        )
    from transformers.utils.chat_template_utils import (
        get_json_schema,  # takes a second, which classes without tools need not wait
    )

    try:
        return dict(get_json_schema(method))
    except Exception as error:  # transformers has classes of errors of its own
        raise ConfigError(
            f"{field_of(path)}: the tool {name} has no schema: {error}; a tool needs a type for each parameter and a "
            f"docstring with a section Args that describes each"
        ) from error
