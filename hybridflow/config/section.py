"""What all sections of a config have in common."""

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """What every section of a config is: frozen, without unknown keys, infinities and NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )


def _expanded(path: str) -> str:
    """`~` is the home directory: neither YAML nor a shell in `key=~/value` writes it out."""
    return os.path.expanduser(path)


PathText = Annotated[str, AfterValidator(_expanded)]
