"""What a layer of latent attention keeps of a token for the backward pass. Pure."""

from hybridflow.architecture.layer_kinds import LatentSizes


def kept_numbers(sizes: LatentSizes, heads: int, recompute: str) -> tuple[int, int]:
    """(what tensor-parallel ranks share by heads, what each has of the rank's own tokens).

    own        the narrow vectors, and those of queries and of keys with values after their norms
    none       queries, keys, values and outputs, all as wide as q; the part of the outputs that is v
    selective  queries, and keys with values, before they are turned; the part of the outputs that is v
    """
    own = sizes.narrow + (sizes.query_rank or 0) + sizes.key_rank
    cut = sizes.value_dim if sizes.value_dim < sizes.head_dim else 0
    if recompute == "none":
        return heads * (4 * sizes.head_dim + cut), own
    return heads * (sizes.head_dim + sizes.plain_dim + 2 * sizes.value_dim), own
