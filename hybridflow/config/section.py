"""What all sections of a config have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """What every section of a config is: frozen, without unknown keys, infinities and NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
