"""Which modules of `recompute` a model has, and which values of the key are worth a try. Pure."""

from collections.abc import Mapping

from hybridflow.architecture.spec import ModelSpec
from hybridflow.config.recompute import MODULES, OF_MIXTURE, Module, Recompute, modules_of, shown
from hybridflow.errors import ConfigError, remedy

WITHOUT: Mapping[str, str] = {
    "layernorm": "no norms in front of attention and MLP",
    "mlp": "no dense MLP",
    "moe": "no experts",
    "moe_act": "no experts",
    "shared_experts": "no shared expert",
}


def modules_in(spec: ModelSpec) -> tuple[Module, ...]:
    """Those that a list may name for the model."""
    has = {
        "core_attn": True,
        "layernorm": spec.has_norms_in_front,
        "mlp": any(kind.mlp == "dense" for kind in spec.layer_kinds),
        "moe": bool(spec.num_experts),
        "moe_act": bool(spec.num_experts),
        "shared_experts": bool(spec.num_experts and spec.shared_ffn_hidden_size),
    }
    return tuple(module for module in MODULES if has[module])


def check_recompute(key: str, recompute: Recompute, spec: ModelSpec) -> None:
    """Raise ConfigError for a module that the model has not."""
    if isinstance(recompute, str):
        return
    known = modules_in(spec)
    for module in recompute:
        if module not in known:
            there = [each for each in recompute if each in known]
            raise ConfigError(
                f"{key} = {shown(recompute)}: {spec.path} has {WITHOUT[module]}, so that {module} means nothing; its "
                f"modules are {', '.join(known)}{remedy({key: [there or 'none']})}"
            )


def steps(spec: ModelSpec) -> tuple[Recompute, ...]:
    """From what costs no time to what leaves least memory: what a search and a plan's hints choose from.

    Attention; of a mixture then norms and the activation, which are no products; then norms, dense MLPs and mixtures.
    """
    known = modules_in(spec)
    light = tuple(module for module in known if module in ("core_attn", "layernorm", "moe_act"))
    heavy = tuple(module for module in known if module in ("core_attn", "layernorm", "mlp", "moe"))
    return ("none", "selective", *([light] if spec.num_experts else []), heavy, "full")


def further(recompute: Recompute, spec: ModelSpec) -> tuple[Recompute, ...]:
    """Those of `steps` that compute more again."""
    now = _covered(recompute)
    more = [each for each in steps(spec) if each != "full" and now < _covered(each)]
    return (*more, *(("full",) if recompute != "full" else ()))


def _covered(recompute: Recompute) -> frozenset[str]:
    """With the modules that `moe` has in it."""
    modules = modules_of(recompute)
    return modules | OF_MIXTURE if "moe" in modules else modules
