"""Routing replay: a mixture takes the experts that the engine chose when it generated a token.

For a token x with router weights W, and E the k experts that the engine chose:

    p = softmax(W x) over all experts, in float32;  the shares are p_e for e in E, divided by their sum if so configured

Probabilities and gradients are the trainer's own; the choice, which has no gradient, is the engine's. Rounding alone
flips a choice now and then, and a flipped expert changes a log-prob far more than rounding does. Ma et al. 2025, arXiv
2510.11370 (R3).

A record is (tokens, layers, k) uint8, or int16 with more than 256 experts. The experts of a token differ, so that k
times expert 0 says that there is none: of the last token of a sequence, whose successor nobody drew, and of padding.
There the trainer's own choice stands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import offsets, to_device_async

Replay = Callable[[Tensor, Tensor], Tensor]  # (t, k) own choice, (t, k) the engine's -> (t, k) int64 to be taken


@dataclass(frozen=True)
class RoutingSizes:
    """Of a record: the layers of the model, the experts of a token, and those of a layer."""

    num_layers: int
    chosen: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds the experts' numbers."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def nothing(self, num_tokens: int) -> Tensor:
        """(tokens, layers, k): no token has a record."""
        return torch.zeros(num_tokens, self.num_layers, self.chosen, dtype=self.dtype)


def is_recorded(experts: Tensor) -> Tensor:
    """(..., k) -> (...) bool: whether these are a record."""
    return experts[..., 0] != experts[..., 1]


def replayed(own: Tensor, experts: Tensor) -> Tensor:
    """The engine's choice, and the own one where there is no record: (t, k) each, int64 out."""
    return torch.where(is_recorded(experts)[:, None], experts.long(), own)


@dataclass(frozen=True)
class RoutingMismatch:
    """Counts how often the trainer would have chosen another set of experts.

    counts: (2,) int64, added to in place: pairs of a token and a layer that differ, and pairs. rows: the tokens that
    count, (r,) int64. own: (r,) bool, which of these this rank has; None: all.
    """

    counts: Tensor
    rows: Tensor
    own: Tensor | None = None

    def replayed(self, own: Tensor, experts: Tensor) -> Tensor:
        """As the function of this name."""
        ours, theirs = own[self.rows].sort().values, experts[self.rows].long().sort().values
        recorded = is_recorded(experts[self.rows])
        if self.own is not None:
            recorded = recorded & self.own
        differ = (ours != theirs).any(1) & recorded
        self.counts.add_(torch.stack([differ.sum(), recorded.sum()]))
        return replayed(own, experts)

    def within(self, start: int, num_tokens: int) -> "RoutingMismatch":
        """Of a rank that has these tokens alone. By a mask: the size of a part would be read from the device."""
        rows = self.rows - start
        return RoutingMismatch(self.counts, rows.clamp(0, num_tokens - 1), (rows >= 0) & (rows < num_tokens))


@dataclass(frozen=True)
class Routing:
    """The engine's experts of the tokens of a micro-batch, in the layers of one model chunk.

    experts: (t, layers, k) on the device. differences: where they are counted.
    counted: the layers that have counted. A layer that is computed again in the backward pass counts once.
    """

    experts: Tensor
    differences: RoutingMismatch | None = None
    counted: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class RoutedTokens:
    """The engine's experts of some tokens on the CPU: (t, layers, k), of the layers of these numbers."""

    experts: Tensor
    layers: tuple[int, ...]

    def of_layers(self, layers: Sequence[int]) -> Tensor:
        """(t, these layers, k)."""
        return self.experts[:, [self.layers.index(layer) for layer in layers]]

    def padded(self, missing: int) -> "RoutedTokens":
        """With so many tokens without a record behind them."""
        nothing = self.experts.new_zeros(missing, *self.experts.shape[1:])
        return RoutedTokens(torch.cat([self.experts, nothing]), self.layers)


@dataclass(frozen=True)
class RowExperts:
    """The engine's experts of those rows of a batch that a rank computes, in the layers of the rank's pipeline stage.

    experts: (tokens of these rows, layers, k) on the CPU. starts: where each row's begin, (N,) int64, without meaning
    of other rows. lengths: of the batch.
    """

    experts: Tensor
    starts: Tensor
    lengths: Tensor
    layers: tuple[int, ...]

    def for_tokens(self, tokens: Tensor) -> RoutedTokens:
        """Of tokens of the batch by their flat positions, (t,) int64."""
        rows = torch.searchsorted(self.lengths.cumsum(0), tokens, right=True)
        within = tokens - offsets(self.lengths)[rows]
        return RoutedTokens(self.experts[self.starts[rows] + within], self.layers)


def routing_of(
    tokens: RoutedTokens | None, rows: Tensor, layers: Sequence[int], counts: Tensor | None
) -> Routing | None:
    """The experts of these layers, on the device of `rows`; None where there are none.

    rows, counts: of `RoutingMismatch`; None: nobody counts.
    """
    if tokens is None:
        return None
    own = to_device_async(tokens.of_layers(layers), rows.device)
    return Routing(own, None if counts is None else RoutingMismatch(counts, rows))


def hand_over(index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A layer's forward pre-hook: the layer's mixture gets the experts that came with the layer's own arguments.

    Also when the layer is computed again in the backward pass, where another micro-batch has been in between. index: of
    the layer in the chunk.
    """
    routing: Routing | None = getattr(kwargs["packed_seq_params"], "routing", None)
    layer.mlp.replayed = None if routing is None else routing.experts[:, index]
    differences = None
    if routing is not None and index not in routing.counted:
        differences = routing.differences
        routing.counted.add(index)
    layer.mlp.differences = differences
    layer.mlp.router.replay = replayed if differences is None else differences.replayed


def take_engines_experts(layer: Any, index: int) -> None:
    """Let a layer with a mixture of experts replay. See `hand_over`."""
    layer.register_forward_pre_hook(partial(hand_over, index), with_kwargs=True)
