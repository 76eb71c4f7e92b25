"""A user's own functions, which a config names as `package.module:function`: where they are looked for and found.

    search_beside("experiments/math.yaml")
    function = load_function("my_rewards:digits", "reward function")

`python -m` has the working directory on Python's path, a console script has not, and neither has the config's. Both are
searched last, so that a file in them hides no installed package; one that bears the name of such a package is refused,
because whichever Python took, the other would silently be out of sight.
"""

import importlib
import site
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.errors import UserCodeError


def search_beside(config: str | Path) -> None:
    """Have Python look into the working directory and the config's, in this order, after all that it knows already."""
    known = {_directory(entry) for entry in sys.path}
    for directory in (Path.cwd(), Path(config).resolve().parent):
        if directory not in known:
            sys.path.append(str(directory))
            known.add(directory)


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; `what` it is to the user starts every message.

    Raises:
        UserCodeError: the module is not found, raises, is also an installed package, or has no such function.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UserCodeError(f"{what} {path!r}: expected package.module:function")
    module = _imported(module_name, f"{what} {path}")
    function: object = getattr(module, attribute, None)
    if function is None:
        file = getattr(module, "__file__", None) or "a namespace package"
        raise UserCodeError(f"{what} {path}: {module_name} ({file}) has no {attribute}")
    if not callable(function):
        raise UserCodeError(f"{what} {path}: is a {type(function).__name__}, which cannot be called")
    return function


def _imported(module_name: str, field: str) -> ModuleType:
    importlib.invalidate_caches()  # a file may have been written since Python last looked
    _check_one_of_a_name(module_name.partition(".")[0], field)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module runs on import and may raise anything
        looked = f"; looked in {_searched()}" if _is_absent(module_name, error) else ""
        raise UserCodeError(f"{field}: cannot import {module_name}: {type(error).__name__}: {error}{looked}") from error


def _is_absent(module_name: str, error: BaseException) -> bool:
    """Whether the module itself is not there, rather than one that it imports."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")


def _check_one_of_a_name(package: str, field: str) -> None:
    if package == __name__.partition(".")[0]:
        return  # it is running, so there is no choice
    own: list[str] = []
    installed: list[str] = []
    for entry in sys.path:
        spec = PathFinder.find_spec(package, [entry])
        if spec is not None and spec.origin is not None:
            (installed if _is_installed(_directory(entry)) else own).append(spec.origin)
    if own and installed:
        raise UserCodeError(
            f"{field}: {package} is {own[0]}, and also the name of an installed package, {installed[0]}: rename yours"
        )


def _searched() -> str:
    """The directories of Python's path that are the user's."""
    own = [_directory(entry) for entry in sys.path]
    own = [directory for directory in dict.fromkeys(own) if directory.is_dir() and not _is_installed(directory)]
    return ", ".join([*map(str, own), "and the installed packages"])


def _is_installed(directory: Path) -> bool:
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots += [*site.getsitepackages(), site.getusersitepackages()]
    return any(directory.is_relative_to(Path(root).resolve()) for root in roots)


def _directory(entry: str) -> Path:
    return Path(entry).resolve()  # '' is the working directory
