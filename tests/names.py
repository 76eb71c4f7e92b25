"""Names of other packages."""

import importlib


def lacks(module: str, name: str) -> bool:
    """Whether a module has no such name, `Class.method` or `function`."""
    found = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            return True
        found = getattr(found, part)
    return False
