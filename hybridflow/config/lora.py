"""The section `lora` of a model that is trained: adapters in place of all its weights."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from hybridflow.config.hub import ModelText
from hybridflow.config.section import Section
from hybridflow.errors import Mendable

RANK = ALPHA = 32
ModuleName = Annotated[str, Field(min_length=1)]


def _named(given: object) -> object:
    """A name alone is a list of one."""
    return (given,) if isinstance(given, str) and given != "all-linear" else given


class LoraConfig(Section):
    """Low-rank adapters of linear layers (Hu et al. 2021, arXiv 2106.09685): these are trained, the model is frozen."""

    rank: PositiveInt | None = None
    """Rows of A and columns of B. null: 32, or those of adapter_path."""
    alpha: PositiveFloat | None = None
    """An adapter's output is multiplied by alpha / rank. null: 32, or that of adapter_path."""
    use_rslora: bool | None = None
    """Whether an adapter's output is multiplied by alpha / sqrt(rank) instead. null: no, or as in adapter_path."""
    target_modules: Annotated[Literal["all-linear"] | tuple[ModuleName, ...] | None, BeforeValidator(_named)] = None
    """Linear layers with an adapter, by names as q_proj or self_attn.q_proj. all-linear: all but routers, routed
    experts and the output layer. null: all-linear, or those of adapter_path."""
    exclude_modules: Annotated[tuple[ModuleName, ...], BeforeValidator(_named)] = ()
    """Linear layers without an adapter, of those in target_modules."""
    adapter_path: Annotated[ModelText, Field(min_length=1)] | None = None
    """A directory of PEFT, its name on the Hub, or a role in a checkpoint with adapters, that the adapters begin with.
    null: new ones, which change nothing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target_modules == ():
            why = "target_modules = []: names no linear layer: give names, or leave the key out"
            raise Mendable(why, {"target_modules": ["all-linear"]})
        return self
