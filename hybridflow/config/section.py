"""What all sections of a config have in common."""

import os
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from hybridflow.config.refused_pairs import refusal

MOST_BYTES = 255  # of one name in a path: NAME_MAX of Linux


class Section(BaseModel):
    """What every section of a config is: frozen, without unknown keys, infinities, NaN and pairs that are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if (wrong := refusal(self)) is not None:
            raise wrong
        return self


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
