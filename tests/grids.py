"""Grids of cheap cases in one test: thousands of tests of a millisecond each are mostly pytest's own work."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any


def each(**axes: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test for all combinations of these arguments; a failure names its own. Fixtures are made once for all."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def whole(**others: Any) -> None:
            for values in itertools.product(*axes.values()):
                case = dict(zip(axes, values, strict=True))
                try:
                    test(**case, **others)
                except BaseException as error:
                    error.add_note(f"with {', '.join(f'{name}={value!r}' for name, value in case.items())}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in axes]
        assert len(left) + len(axes) == len(signature.parameters), f"{test.__name__} lacks one of {list(axes)}"
        whole.__signature__ = signature.replace(parameters=left)
        return whole

    return decorate
