"""What all sections of a config have in common."""

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

MOST_BYTES = 255  # of one name in a path: NAME_MAX of Linux


class Section(BaseModel):
    """What every section of a config is: frozen, without unknown keys, infinities and NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )


def _expanded(path: str) -> str:
    """`~` is the home directory: neither YAML nor a shell in `key=~/value` writes it out."""
    check_length(path, MOST_BYTES)
    return os.path.expanduser(path)


def check_length(path: str, most: int) -> str:
    """The path, whose names have so many bytes at most. Errors: PydanticCustomError."""
    longest = max(len(name.encode(errors="surrogatepass")) for name in path.split("/"))
    if longest > most:
        raise PydanticCustomError("long_name", f"{longest} bytes are too long for a file's name: at most {most}")
    return path


PathText = Annotated[str, AfterValidator(_expanded)]
