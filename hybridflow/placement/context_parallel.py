"""Context parallelism, `models.context`, before a run: what it asks of a model, and what it takes. Pure."""

from hybridflow.architecture.mixers.known import mixer_shares
from hybridflow.architecture.spec import ModelSpec
from hybridflow.config import RoleConfig
from hybridflow.errors import ConfigError, divisors, remedy
from hybridflow.parallel.layout import Layout


def check_context(name: str, config: RoleConfig, spec: ModelSpec, *, cuda: bool) -> None:
    """Raise ConfigError where several ranks cannot compute one row."""
    ranks = config.context_parallel_size
    given = f"{name}.context_parallel_size = {ranks}"
    if ranks == 1:
        return
    if cuda and config.dtype == "float32":
        raise ConfigError(
            f"{given} needs dtype = bfloat16 on GPUs, it is float32: torch's attention in float32 tells no log-sum-exps"
            f"{remedy({f'{name}.dtype': ['bfloat16'], f'{name}.context_parallel_size': [1]})}"
        )
    tp = config.tensor_parallel_size
    for mixer in mixer_shares(spec):
        heads = mixer.context_heads(spec, tp)
        if heads is not None and heads % ranks:
            raise ConfigError(
                f"{given}: {spec.path} has {mixer.title}, of whose {heads} key heads on a tensor-parallel "
                f"rank each takes an equal share{remedy({f'{name}.context_parallel_size': divisors(heads)})}"
            )


def shares_tokens(spec: ModelSpec, tp: int, ranks: int) -> bool:
    """Whether so many ranks can share tokens: where a mixer deals heads, the heads split evenly over the ranks."""
    dealt = [mixer.context_heads(spec, tp) for mixer in mixer_shares(spec)]
    return all(heads is None or heads % ranks == 0 for heads in dealt)


def context_bytes(spec: ModelSpec, layout: Layout, *, itemsize: int, tokens: int, backward: bool = False) -> int:
    """What mixers have of other ranks' tokens while they run, with context parallelism: one layer at a time."""
    if layout.cp == 1:
        return 0
    sizes = {"tp": layout.tp, "ranks": layout.cp, "itemsize": itemsize, "tokens": tokens}
    return max(mixer.context_bytes(spec, **sizes, backward=backward) for mixer in mixer_shares(spec))
