"""reasoning-gym where it is installed: what tests ask before they need it."""

import importlib.metadata

import pytest

from hybridflow.config.reasoning_gym import RELEASE


def release() -> str | None:
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return None


needs_package = pytest.mark.skipif(release() != RELEASE, reason=f"reasoning-gym {RELEASE} is not installed")
