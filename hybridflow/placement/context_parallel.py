"""Context parallelism, `models.context`, before a run: what it asks of a model, and what it takes. Pure."""

from hybridflow.architecture.spec import ModelSpec
from hybridflow.config import RoleConfig
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Layout

REFUSED = {"delta_net": "a state that goes from token to token", "window": "attention within windows"}  # mixers


def check_context(name: str, config: RoleConfig, spec: ModelSpec, *, cuda: bool) -> None:
    """Raise ConfigError where attention of one row cannot be computed by several ranks."""
    given = f"{name}.context_parallel_size = {config.context_parallel_size}"
    if config.context_parallel_size == 1:
        return
    if cuda and config.dtype == "float32":
        raise ConfigError(
            f"{given} needs dtype = bfloat16 on GPUs, it is float32: torch's attention in float32 tells no log-sum-exps"
        )
    for mixer in dict.fromkeys(kind.mixer for kind in spec.layer_kinds):
        if mixer in REFUSED:
            what = REFUSED[mixer]
            raise ConfigError(f"{given}: {spec.path} has layers with {what}, which ranks cannot share here. Write 1")


def context_bytes(spec: ModelSpec, layout: Layout, *, itemsize: int, tokens: int, backward: bool = False) -> int:
    """What attention has of other ranks' tokens while it runs, with context parallelism: one layer at a time.

    b c tokens 2 k / tp: keys and values of all c ranks, k = kv heads x head_dim; in latent attention all heads, since a
    head's key and value are made before they travel. As much again of those that the own pieces read, in the order in
    which the kernel reads; backward, gradients of both.
    """
    if layout.cp == 1:
        return 0
    whole = itemsize * layout.cp * tokens * gathered_columns(spec, layout.tp)
    return (4 if backward else 2) * whole


def gathered_columns(spec: ModelSpec, tp: int) -> int:
    """Elements of a token's key and value on a tensor-parallel rank."""
    heads = spec.num_heads if spec.latent is not None else spec.num_kv_heads
    return 2 * max(heads // tp, 1) * spec.head_dim
