"""What the layers of a model are made of, and the sizes that one kind of layer alone has."""

from typing import Literal, NamedTuple

# What lets the tokens of a sequence read each other. window: attention that reaches back `sliding_window` tokens;
# latent: attention to keys and values that are made of one narrow vector a token (MLA); delta_net: a gated delta net;
# unturned: attention whose queries and keys no rotary embedding turns (NoPE).
MixerName = Literal["attention", "window", "latent", "delta_net", "unturned"]
MlpName = Literal["dense", "experts"]  # what a token goes through behind it


class LayerKind(NamedTuple):
    """What a layer is made of."""

    mixer: MixerName = "attention"
    mlp: MlpName = "dense"


DENSE, EXPERTS = LayerKind(), LayerKind(mlp="experts")


class DeltaSizes(NamedTuple):
    """Of a gated delta net: heads of keys and values, their dimensions, and the tokens that the convolution reads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Rows of all keys; of the queries as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def runs(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values, which are each cut by heads."""
        return self.keys, self.keys, self.values


class RouterSizes(NamedTuple):
    """How the weights of a token's experts are made."""

    normalizes: bool = True  # they sum to 1
    scaling: float = 1.0  # what they are multiplied with
    groups: int = 1  # of experts; a token's are of the `chosen_groups` best
    chosen_groups: int = 1


PLAIN_ROUTER = RouterSizes()


class LatentSizes(NamedTuple):
    """Of latent attention (MLA): queries, and keys with values, are made of one narrow vector a token each."""

    query_rank: int | None  # of the vector that queries are made of; None: of the hidden state itself
    key_rank: int  # of the vector that keys and values of all heads are made of
    plain_dim: int  # of a head's query and key, what does not turn
    rotary_dim: int  # what turns; of the key it is the same for all heads
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Of a query and a key."""
        return self.plain_dim + self.rotary_dim

    @property
    def narrow(self) -> int:
        """Of the vectors that queries, keys and values are made of, and the key that turns."""
        return (self.query_rank or 0) + self.cached

    @property
    def cached(self) -> int:
        """Numbers of a token that an engine keeps in a layer, on every tensor-parallel rank."""
        return self.key_rank + self.rotary_dim
