"""Routing replay: a mixture takes the experts that the engine chose when it generated a token.

For a token x with router weights W, and E the k experts that the engine chose:

    p = softmax(W x) over all experts, in float32;  the shares are p_e for e in E, divided by their sum if so configured

Probabilities and gradients are the trainer's own; the choice, which has no gradient, is the engine's. Rounding alone
flips a choice now and then, and a flipped expert changes a log-prob far more than rounding does. Ma et al. 2025, arXiv
2510.11370 (R3).

A record is (tokens, layers, k) uint8, or uint16 with more than 256 experts, as vLLM has it. Nothing wider is made of a
record: the router of a layer widens that layer's (t, k) on the device. The experts of a token differ, so that k times
expert 0 says that there is none: of the last token of a sequence, whose successor nobody drew, and of padding. There
the trainer's own choice stands.

The load of experts is counted where experts are chosen, whoever chose them: see `ExpertLoad`.

Axes of tensors, as suffixes: t tokens, l layers, k the experts of a token, r the tokens that count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import offsets, to_device_async

Replay = Callable[[Tensor, Tensor], Tensor]  # (trainer_tk, engine_tk) -> (t, k) int64, to be taken


@dataclass(frozen=True)
class RoutingSizes:
    """Of a record: the layers of the model, the experts of a token, and those of a layer."""

    num_layers: int
    chosen: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds the experts' numbers."""
        return torch.uint8 if self.num_experts <= 256 else torch.uint16

    def nothing(self, num_tokens: int) -> Tensor:
        """(tokens, layers, k): no token has a record."""
        return torch.zeros(num_tokens, self.num_layers, self.chosen, dtype=self.dtype)


def bits(experts: Tensor) -> Tensor:
    """The same memory, signed where a record has two bytes: torch 2.13 neither writes by index nor orders uint16."""
    return experts.view(torch.int16) if experts.dtype == torch.uint16 else experts


def as_record(experts: Tensor) -> Tensor:
    """What a file has, as a record. Former versions wrote int16 of the same bits."""
    return experts.view(torch.uint16) if experts.dtype == torch.int16 else experts


def is_recorded(experts: Tensor) -> Tensor:
    """(..., k) -> (...) bool: whether these are a record."""
    return experts[..., 0] != experts[..., 1]


def replayed(trainer_tk: Tensor, engine_tk: Tensor) -> Tensor:
    """The engine's choice, and the trainer's where there is no record: (t, k) each, int64 out."""
    engine_tk = engine_tk.long()  # of one layer; not every operation on a device knows uint16
    return torch.where(is_recorded(engine_tk)[:, None], engine_tk, trainer_tk)


@dataclass(frozen=True)
class RoutingMismatch:
    """Counts how often the trainer would have chosen another set of experts.

    counts: (2,) int64, added to in place: pairs of a token and a layer that differ, and pairs. token_r: the tokens that
    count, (r,) int64. held_r: (r,) bool, which of these this rank has; None: all.
    """

    counts: Tensor
    token_r: Tensor
    held_r: Tensor | None = None

    def replayed(self, trainer_tk: Tensor, engine_tk: Tensor) -> Tensor:
        """As the function of this name."""
        engine_tk = engine_tk.long()
        trainer_rk, engine_rk = trainer_tk[self.token_r].sort().values, engine_tk[self.token_r].sort().values
        recorded_r = is_recorded(engine_tk[self.token_r])
        if self.held_r is not None:
            recorded_r = recorded_r & self.held_r
        differ_r = (trainer_rk != engine_rk).any(1) & recorded_r
        self.counts.add_(torch.stack([differ_r.sum(), recorded_r.sum()]))
        return replayed(trainer_tk, engine_tk)

    def within(self, start: int, num_tokens: int) -> "RoutingMismatch":
        """Of a rank that has these tokens alone. By a mask: the size of a part would be read from the device."""
        token_r = self.token_r - start
        return RoutingMismatch(self.counts, token_r.clamp(0, num_tokens - 1), (token_r >= 0) & (token_r < num_tokens))


@dataclass(frozen=True)
class ExpertLoad:
    """Counts the tokens that go to each expert, without a wait for the device.

    A token is an entry of a row of the batch: of prompts and responses all but a row's last token, which no pass runs.
    A prompt that is run once for several rows counts once for each of them, padding never, so that the counts depend
    neither on the layout nor on the micro-batches.

    counts: (layers of the model, experts) int64, added to in place. times_t: int64 of a micro-batch: for how many
    rows each token is run. layers: of the model chunk.
    """

    counts: Tensor
    times_t: Tensor
    layers: Sequence[int]

    def add(self, index: int, rank: int, chosen_tk: Tensor) -> None:
        """chosen_tk: what layer `index` of the chunk takes; of fewer tokens where tensor-parallel ranks share them, of
        which `rank` has its part."""
        times_t = self.times_t
        if len(chosen_tk) < len(times_t):
            times_t = times_t.narrow(0, rank * len(chosen_tk), len(chosen_tk))
        times_tk = times_t[:, None].expand_as(chosen_tk)
        self.counts[self.layers[index]].scatter_add_(0, chosen_tk.reshape(-1), times_tk.reshape(-1))


@dataclass(frozen=True)
class Routing:
    """What the mixtures of one model chunk have to know of a micro-batch's tokens.

    experts: the engine's, (t, layers, k) on the device; None: each router chooses. differences, load: where they are
    counted. counted: the layers that have counted. A layer that is computed again in the backward pass counts once.
    """

    experts: Tensor | None
    differences: RoutingMismatch | None = None
    load: ExpertLoad | None = None
    counted: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class RoutingCounts:
    """Of a rank and an iteration, on the device: of `RoutingMismatch` and `ExpertLoad`. None: nobody counts."""

    differ: Tensor | None
    load: Tensor | None


@dataclass(frozen=True)
class RoutedTokens:
    """The engine's experts of some tokens on the CPU: (t, layers, k), of the layers of these numbers."""

    experts: Tensor
    layers: tuple[int, ...]

    def of_layers(self, layers: Sequence[int]) -> Tensor:
        """(t, these layers, k)."""
        if tuple(layers) == self.layers:
            return self.experts
        return self.experts[:, [self.layers.index(layer) for layer in layers]]

    def padded(self, missing: int) -> "RoutedTokens":
        """With so many tokens without a record behind them."""
        nothing = self.experts.new_zeros(missing, *self.experts.shape[1:])
        return RoutedTokens(torch.cat([self.experts, nothing]), self.layers)


@dataclass(frozen=True)
class RowExperts:
    """The engine's experts of those rows of a batch that a rank computes, in the layers of the rank's pipeline stage.

    experts: by row (tokens, layers, k) on the CPU; None of a row without a record. nothing: (0, layers, k). lengths: of
    the batch's rows.
    """

    experts: Mapping[int, Tensor | None]
    nothing: Tensor
    lengths: Tensor
    layers: tuple[int, ...]

    def for_tokens(self, tokens: Tensor) -> RoutedTokens:
        """Of tokens of the batch by their flat positions, (t,) int64: one copy of what lies in the rows' records."""
        rows = torch.searchsorted(self.lengths.cumsum(0), tokens, right=True)
        within = tokens - offsets(self.lengths)[rows]
        begins = torch.ones(len(tokens), dtype=torch.bool)  # of stretches of a row
        begins[1:] = (rows.diff() != 0) | (within.diff() != 1)
        first = begins.nonzero().flatten()
        lengths = torch.cat([first, torch.tensor([len(tokens)])]).diff().tolist()
        stretches = zip(rows[first].tolist(), within[first].tolist(), lengths, strict=True)
        parts = [self._of_stretch(row, start, length) for row, start, length in stretches]
        return RoutedTokens(torch.cat([self.nothing, *parts]), self.layers)

    def _of_stretch(self, row: int, start: int, length: int) -> Tensor:
        whole = self.experts[row]
        if whole is None:
            return self.nothing.new_zeros(length, *self.nothing.shape[1:])
        return whole[start : start + length]


def routing_of(
    tokens: RoutedTokens | None,
    token_r: Tensor,
    layers: Sequence[int],
    counts: RoutingCounts | None,
    rows_per_token: Callable[[], Tensor],
) -> Routing | None:
    """What the mixtures of these layers need, on the device of `token_r`; None where they neither replay nor count.

    token_r: of `RoutingMismatch`. counts: None: nobody counts. rows_per_token: `times_t` of `ExpertLoad`, on the CPU.
    """
    if tokens is None and (counts is None or counts.load is None):
        return None
    engine_tlk = None if tokens is None else to_device_async(tokens.of_layers(layers), token_r.device)
    differences, load = None, None
    if counts is not None and counts.differ is not None and engine_tlk is not None:
        differences = RoutingMismatch(counts.differ, token_r)
    if counts is not None and counts.load is not None:
        load = ExpertLoad(counts.load, to_device_async(rows_per_token(), token_r.device), layers)
    return Routing(engine_tlk, differences, load)


def hand_over(index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A layer's forward pre-hook: the layer's mixture gets the experts that came with the layer's own arguments.

    Also when the layer is computed again in the backward pass, where another micro-batch has been in between. index: of
    the layer in the chunk.
    """
    routing: Routing | None = getattr(kwargs["packed_seq_params"], "routing", None)
    layer.mlp.engine_experts = None if routing is None or routing.experts is None else routing.experts[:, index]
    differences, load = None, None
    if routing is not None and index not in routing.counted:
        differences, load = routing.differences, routing.load
        routing.counted.add(index)
    layer.mlp.differences = differences
    layer.mlp.router.replay = replayed if differences is None else differences.replayed
    layer.mlp.router.count = None if load is None else partial(load.add, index, _rank(layer.mlp.group))


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def count_load(router: Any, arguments: object, output: tuple[Tensor, Tensor]) -> None:
    """A router's forward hook: adds the chosen experts to the load; with replay the engine's are the chosen ones."""
    if router.count is not None:
        router.count(output[1])


def follow_routing(layer: Any, index: int) -> None:
    """Let a layer with a mixture of experts replay and count. See `hand_over` and `count_load`."""
    layer.register_forward_pre_hook(partial(hand_over, index), with_kwargs=True)
    layer.mlp.router.register_forward_hook(count_load)
