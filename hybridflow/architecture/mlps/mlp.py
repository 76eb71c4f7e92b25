"""What every kind of MLP has to say: its weights, and what these cost. Pure. See `mixers.mixer`.

b is the bytes of an element, h and f are the hidden and the ffn size, and tp and etp the ranks that share an MLP and an
expert.
"""

from abc import ABC, abstractmethod
from collections.abc import Set

from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Weight
from hybridflow.parallel.layout import Cut

SharedProduct = tuple[float, float, float]  # (k, n, share of the tokens)


class Mlp(ABC):
    """One kind of MLP, for all models: each method takes the model's spec. cut: how ranks share its weights."""

    @property
    @abstractmethod
    def fuses_norm(self) -> bool:
        """Whether Transformer Engine has the norm in front within the first linear layer."""

    @abstractmethod
    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        """Of a layer, but for the norm in front."""

    @abstractmethod
    def products(self, spec: ModelSpec, *, tp: int, expert_tp: int) -> list[SharedProduct]:
        """The matrix products of a layer on one rank: one for each expert of a token."""

    @abstractmethod
    def activation_bytes(
        self, spec: ModelSpec, *, cut: Cut, sequence_parallel: bool, again: Set[str], itemsize: int
    ) -> float:
        """Bytes of a token that a layer keeps for the backward pass. again: modules that are computed again."""

    @abstractmethod
    def gathers(self, cut: Cut, *, sequence_parallel: bool) -> bool:
        """Whether a rank reads, and keeps, the tokens of all tensor-parallel ranks, where each has own ones alone."""

    @abstractmethod
    def passing_bytes(self, spec: ModelSpec, *, cut: Cut, itemsize: int, counted: bool) -> float:
        """Bytes of a token that a layer makes and keeps while it runs, beside `activation_bytes`.

        counted: whether rows of experts are counted on the device alone, where ranks of a replica have whole ones.
        """

    @abstractmethod
    def runs_again(self, again: Set[str]) -> bool:
        """Whether all linear layers that may have adapters are computed again."""


def matrices(spec: ModelSpec, width: float, share: float = 1.0) -> list[SharedProduct]:
    """Of an MLP of so many columns on a rank."""
    hidden_size = float(spec.hidden_size)
    return [(hidden_size, (2 if spec.traits.mlp.gated else 1) * width, share), (width, hidden_size, share)]
