"""Context parallelism, `models.context`, before a run: what it asks of a model, and what it takes. Pure."""

from hybridflow.architecture.spec import ModelSpec
from hybridflow.config import RoleConfig
from hybridflow.errors import ConfigError
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
        )
    if spec.delta is not None and (heads := spec.delta.key_heads // config.tensor_parallel_size) % ranks:
        raise ConfigError(
            f"{given}: {spec.path} has gated delta nets, of whose {heads} key heads on a tensor-parallel "
            f"rank each takes an equal share. Write a divisor of {heads}"
        )


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
