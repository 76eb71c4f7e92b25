"""The key `recompute`: which activations the backward pass computes again. Pure.

    recompute: none | selective | full | [core_attn, layernorm, moe_act]

A list has megatron-core's names of modules (`recompute_modules`). `selective` is the list of core attention alone.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

Module = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
Amount = Literal["none", "selective", "full"]
MODULES: tuple[Module, ...] = get_args(Module)
AMOUNTS: tuple[Amount, ...] = get_args(Amount)
Recompute = Amount | tuple[Module, ...]
OF_MIXTURE = frozenset({"moe_act", "shared_experts"})  # what `moe` has in it
OF_AMOUNT: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "selective": frozenset({"core_attn"}),
    "full": frozenset(MODULES),
}


def modules_of(recompute: Recompute) -> frozenset[str]:
    """The modules that are computed again; of `full`, where whole layers are, all of them."""
    return OF_AMOUNT[recompute] if isinstance(recompute, str) else frozenset(recompute)


def shown(recompute: Recompute) -> str:
    """As a config or a command line has it: `full`, or `[core_attn,moe_act]`."""
    return recompute if isinstance(recompute, str) else f"[{','.join(recompute)}]"


def _known(value: Any) -> Any:
    """Errors: ValueError naming what is neither an amount nor a list of modules."""
    names = f"{', '.join(AMOUNTS)}, or a list of {', '.join(MODULES)}"
    if isinstance(value, str):
        if value in MODULES:
            raise ValueError(f"{value!r} is the name of a module: recompute takes {names}. Write [{value}]")
        if value not in AMOUNTS:
            raise ValueError(f"{value!r} is none of these: {names}")
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is none of these: {names}")
    if not value:
        raise ValueError(f"[] names no module: give some of {', '.join(MODULES)}, or none in place of the list")
    unknown = [name for name in value if name not in MODULES]
    if unknown:
        amount = f". Write {unknown[0]} without brackets" if unknown[0] in AMOUNTS else ""
        raise ValueError(f"{list(value)}: {unknown[0]!r} is none of the modules {', '.join(MODULES)}{amount}")
    twice = [name for i, name in enumerate(value) if name in value[:i]]
    if twice:
        raise ValueError(f"{list(value)}: {twice[0]} stands in it more than once")
    return value


def _in_order(value: Recompute) -> Recompute:
    return value if isinstance(value, str) else tuple(name for name in MODULES if name in value)


RecomputeKey = Annotated[
    Amount | Annotated[tuple[Module, ...], Field(min_length=1)], BeforeValidator(_known), AfterValidator(_in_order)
]
