"""What every token mixer has to say: its weights, and what these cost. Pure.

A mixer lets the tokens of a sequence read each other; all else in a layer is of single tokens. Plans, predicted
seconds, the engine's cache and context parallelism ask these methods, and know no mixer by name. The modules are in
`models`.

    b    bytes of an element (itemsize)         tp   tensor-parallel ranks
    t    tokens of one of the ranks             c    ranks that share the tokens of a row (context parallelism)
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Weight

CacheKind = Literal["tokens", "window", "state"]
Product = tuple[float, float]  # (k, n): of (tokens, k) and (k, n)


class LayerCache(NamedTuple):
    """Bytes that the engine keeps of a sequence in a layer, on a tensor-parallel rank."""

    token: int  # of each token
    state: int = 0  # of the sequence, however long
    window: int | None = None  # how many last tokens are kept; None: all

    @property
    def kind(self) -> CacheKind:
        return "state" if self.state else "tokens" if self.window is None else "window"

    def read(self, context: float) -> float:
        """Bytes that a step moves for a sequence of so many tokens. A state is read and written."""
        return self.token * min(context, self.window or context) + 2 * self.state


class TokenMixer(ABC):
    """One kind of mixer, for all models: each method takes the model's spec."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What error messages call layers with the mixer."""

    @property
    @abstractmethod
    def fuses_norm(self) -> bool:
        """Whether Transformer Engine has the norm in front within the first linear layer."""

    @property
    @abstractmethod
    def gathers_again(self) -> bool:
        """Whether core attention that is computed again gathers again, with context parallelism."""

    @abstractmethod
    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        """Of a layer, but for the norm in front."""

    @abstractmethod
    def products(self, spec: ModelSpec, *, tp: int, split: int = 1) -> list[Product]:
        """The matrix products of a layer on one rank, the output's last.

        split: ranks among which sequence parallelism divides tokens. A product of own tokens alone has n / split.
        """

    @abstractmethod
    def flops(self, spec: ModelSpec, *, pairs: float, tokens: float) -> float:
        """Operations of a layer forward, beside the products. pairs: queries with keys that causal attention reads."""

    @abstractmethod
    def padding(self, spec: ModelSpec) -> float:
        """Operations that kernels do, over `flops`."""

    @abstractmethod
    def elementwise(self, spec: ModelSpec) -> tuple[float, float]:
        """Elements that are read or written a token, beside those of norms, sums and rotation: (of all heads, own)."""

    @abstractmethod
    def activation_bytes(self, spec: ModelSpec, *, again: bool, itemsize: int, over_ranks: bool) -> tuple[float, float]:
        """Bytes of a token that a layer keeps for the backward pass: (of all heads, own).

        Tensor-parallel ranks share the first by heads; each has the second of the rank's own tokens.
        again: core attention is computed again. over_ranks: with context parallelism.
        """

    @abstractmethod
    def cache(self, spec: ModelSpec, *, tp: int, itemsize: int) -> LayerCache:
        """What the engine keeps in a layer."""

    @abstractmethod
    def block_tokens(self, *, cuda: bool) -> int:
        """Tokens of a block of vLLM 0.32.0's cache, at least; 0: no tokens are kept."""

    @abstractmethod
    def cache_words(self, spec: ModelSpec, *, tp: int, layers: int) -> str:
        """The factors of the cache's elements a token, for an error message."""

    @abstractmethod
    def context_columns(self, spec: ModelSpec, tp: int) -> int:
        """Elements of a token that a tensor-parallel rank sends the ranks that share tokens with it."""

    @abstractmethod
    def context_tokens(self, spec: ModelSpec, *, tokens: float, pairs: float, ranks: int, split: int) -> float:
        """Tokens of which all c ranks together send `context_columns`, where each has `tokens` with `pairs`.

        split: as in `products`.
        """

    @abstractmethod
    def context_bytes(self, spec: ModelSpec, *, tp: int, ranks: int, itemsize: int, tokens: int, backward: bool) -> int:
        """Bytes of other ranks' tokens that a rank has while a layer runs. tokens: of the rank."""

    @abstractmethod
    def context_heads(self, spec: ModelSpec, tp: int) -> int | None:
        """Heads of a rank that are dealt to the ranks that share tokens; None: heads are not dealt."""

    @abstractmethod
    def remade(self, spec: ModelSpec, tp: int) -> Product | None:
        """The product that a rank also computes of other ranks' tokens; None: there is none."""
