"""What a layer of latent attention keeps of a token for the backward pass. Pure."""

from hybridflow.architecture.spec import ModelSpec
from hybridflow.config.recompute import Recompute

LOG_SUM_EXP = 4  # bytes a head


def latent_bytes(
    spec: ModelSpec, *, recompute: Recompute, itemsize: int, over_ranks: bool = False
) -> tuple[float, float]:
    """(bytes that tensor-parallel ranks share by heads, bytes that each has of the rank's own tokens).

    own        the narrow vectors, and those of queries and of keys with values after their norms
    none       queries, keys, values and outputs, all as wide as q; the part of the outputs that is v; log-sum-exps
    selective  queries, and keys with values, before they are turned; the part of the outputs that is v

    over_ranks: with context parallelism. Keys and values are made again; the vectors that travel are kept besides.
    """
    assert spec.latent is not None, f"{spec.family} has no latent attention"
    sizes, heads = spec.latent, spec.num_heads
    own = sizes.narrow + (sizes.query_rank or 0) + sizes.key_rank
    if over_ranks:
        own += sizes.cached
        if recompute == "selective":
            return itemsize * heads * (sizes.head_dim + sizes.value_dim), itemsize * own
        return heads * (itemsize * (2 * sizes.head_dim + sizes.value_dim) + LOG_SUM_EXP), itemsize * own
    if recompute == "selective":
        return itemsize * heads * (sizes.head_dim + sizes.plain_dim + 2 * sizes.value_dim), itemsize * own
    cut = sizes.value_dim if sizes.value_dim < sizes.head_dim else 0
    return heads * (itemsize * (4 * sizes.head_dim + cut) + LOG_SUM_EXP), itemsize * own
