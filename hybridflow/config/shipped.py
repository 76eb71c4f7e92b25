"""The configs that come with hybridflow: configs/ of a checkout, hybridflow/configs/ of an installed package."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def shipped_configs() -> Path:
    """The directory. It has the quickstarts, shapes/ and recipes/."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"
