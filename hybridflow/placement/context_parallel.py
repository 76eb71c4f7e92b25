"""Context parallelism, `models.context`, before a run: what it asks of a model, and what it takes. Pure."""

from hybridflow.architecture.layer_kinds import Mixer
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
    if not shares_tokens(spec, config.tensor_parallel_size, ranks):
        heads = spec.delta.key_heads // config.tensor_parallel_size if spec.delta is not None else 0
        raise ConfigError(
            f"{given}: {spec.path} has gated delta nets, of whose {heads} key heads on a tensor-parallel "
            f"rank each takes an equal share. Write a divisor of {heads}"
        )


def shares_tokens(spec: ModelSpec, tp: int, ranks: int) -> bool:
    """Whether so many ranks can: of delta nets each takes an equal share of a tensor-parallel rank's heads."""
    return spec.delta is None or spec.delta.key_heads // tp % ranks == 0


def context_bytes(spec: ModelSpec, layout: Layout, *, itemsize: int, tokens: int, backward: bool = False) -> int:
    """What mixers have of other ranks' tokens while they run, with context parallelism: one layer at a time.

    Attention: b c tokens 2 k / tp, keys and values of all c ranks, k = kv heads x head_dim. As much again of those that
    the own pieces read, in the order in which the kernel reads; backward, gradients of both, for which flash attention
    has all query heads in the place of fewer key/value heads. Latent attention: keys and values of all heads, made of
    what travels, and two copies on the way; backward, twice as much. Windows: the own keys and values, and those in
    reach, as they are and in float32. Delta nets: what is sent and what arrives; backward, gradients of both.
    """
    if layout.cp == 1:
        return 0
    times, found = 2 if backward else 1, [0]
    of_queries = 2 * spec.num_heads // layout.tp * spec.head_dim
    for mixer in set(spec.mixers or ("attention",)):
        columns = gathered_columns(spec, mixer, layout.tp)
        if mixer == "window":
            ends = min(tokens, 2 * ((spec.sliding_window or 1) - 1))  # of one sequence: of several there are more
            found.append(times * columns * (2 * (4 + itemsize) * tokens + (4 + layout.cp * itemsize) * ends))
        elif mixer == "delta_net":
            found.append(times * 2 * itemsize * tokens * columns)
        elif mixer == "latent":
            found.append(times * 3 * itemsize * layout.cp * tokens * of_queries)
        else:
            grouped = of_queries if backward and of_queries > columns else 0
            found.append(itemsize * layout.cp * tokens * (times * 2 * columns + grouped))
    return max(found)


def gathered_columns(spec: ModelSpec, mixer: Mixer, tp: int) -> int:
    """Elements that a tensor-parallel rank sends of a token.

    Key and value of the rank's heads; the narrow vectors of latent attention; what a delta net reads and gives.
    """
    if mixer == "latent" and spec.latent is not None:
        return spec.latent.cached
    if mixer == "delta_net" and spec.delta is not None:
        return (2 * spec.delta.keys + 3 * spec.delta.values + 2 * spec.delta.value_heads) // tp
    return 2 * max(spec.num_kv_heads // tp, 1) * spec.head_dim
