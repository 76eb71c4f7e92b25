"""How tokens get to the ranks that hold their experts, and the outputs back: one protocol, three ways.

    within a replica   the tensor-parallel ranks hold parts of the experts, and all of them see all tokens: nothing is
                       sent; the sum over the ranks is the output
    all-to-all         replicas share the experts: each rank has own tokens, and sends each of them once to every rank
                       that holds one of the token's experts
    DeepEP             the same by DeepEP's kernels (`token_dispatchers`)

A model takes one of them when it is built. What a rank gets is tokens with the experts that it holds; the rank's own
copies by expert are made behind that (`expert_rows`), and outputs are summed by token before they go back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from hybridflow.models.expert_rows import ExpertKernels, ExpertOrder, rows_of, sums_of
from hybridflow.parallel.device import to_host_async
from hybridflow.parallel.layout import Place


@dataclass(frozen=True)
class Arrived:
    """Tokens of which this rank holds some experts.

    tokens: (n, hidden). shares: (n, k) float32. experts: (n, k), numbered from this rank's first; another number where
    the choice is not held here. num_copies: how many choices are held; None: it is not known on the host.
    """

    tokens: Tensor
    shares: Tensor
    experts: Tensor
    num_copies: int | None


@dataclass(frozen=True)
class Sent:
    """Tokens on their way. arrived: waits for them, once. back: the outputs (n, hidden) -> (t, hidden), of this rank's
    tokens the sum over their experts."""

    arrived: Callable[[], Arrived]
    back: Callable[[Tensor], Tensor]


class TokenDispatcher(Protocol):
    """Collective over the ranks that share the experts, all calls in one order."""

    sends: bool  # whether ranks have own tokens, which travel

    def tokens(self, hidden: Tensor) -> Tensor:
        """(a, b, hidden) of this rank -> (t, hidden), which this rank routes."""

    def dispatch(self, tokens: Tensor, shares: Tensor, experts: Tensor) -> Sent:
        """(t, hidden), (t, k) float32, (t, k) numbers of all experts. What else the rank computes before it asks for
        what has arrived runs while tokens travel."""


class WithinReplica:
    """Of tensor-parallel ranks. group: those; place: this rank's part of the experts."""

    sends = False

    def __init__(
        self, place: Place, num_held: int, group: dist.ProcessGroup | None, *, sequence_parallel: bool
    ) -> None:
        self._first, self._holds_all = place.ep_rank * num_held, place.ep == 1
        self._group, self._sequence_parallel = group, sequence_parallel

    def tokens(self, hidden: Tensor) -> Tensor:
        """See `TokenDispatcher`. With sequence parallelism those of all ranks."""
        if self._sequence_parallel:
            # what comes back of the gradient is summed in `dispatch` already
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self._group)
        return hidden.flatten(0, -2)

    def dispatch(self, tokens: Tensor, shares: Tensor, experts: Tensor) -> Sent:
        """See `TokenDispatcher`. Outputs are this rank's tokens', with sequence parallelism the rank's part."""
        # each rank's part of the experts gives a part of these gradients; their sum is the router's and the tokens'
        tokens, shares = (copy_to_tensor_model_parallel_region(x, group=self._group) for x in (tokens, shares))
        own = experts if self._holds_all else experts - self._first
        arrived = Arrived(tokens, shares, own, experts.numel() if self._holds_all else None)
        return Sent(lambda: arrived, self._summed)

    def _summed(self, outputs: Tensor) -> Tensor:
        if self._sequence_parallel:
            summed: Tensor = reduce_scatter_to_sequence_parallel_region(outputs, group=self._group)
        else:
            summed = reduce_from_tensor_model_parallel_region(outputs, group=self._group)
        return summed


class AllToAll:
    """Between the ranks of `group`, which hold the parts of the experts in the order of `Cut.places`.

    A layer sends four messages: how many tokens and copies come, the tokens, their choices, and the outputs. The first
    is read back on the host, once a layer: the others' sizes are in it.
    """

    sends = True

    def __init__(self, place: Place, num_held: int, group: dist.ProcessGroup, kernels: ExpertKernels) -> None:
        """num_held: whole or cut experts of each rank. kernels: they also order tokens by rank."""
        self._place, self._num_held, self._group, self._kernels = place, num_held, group, kernels

    def tokens(self, hidden: Tensor) -> Tensor:
        """See `TokenDispatcher`."""
        return hidden.flatten(0, -2)

    def dispatch(self, tokens: Tensor, shares: Tensor, experts: Tensor) -> Sent:
        """See `TokenDispatcher`."""
        ep, tp = self._place.ep, self._place.tp
        runs = experts // self._num_held
        outgoing = torch.stack([_tokens_of(runs, ep), _copies_of(runs, ep)], dim=1).repeat_interleave(tp, 0)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self._group)
        sizes = to_host_async(torch.cat([outgoing[:, 0], incoming[:, 0], incoming[:, 1].sum(0, keepdim=True)]))
        ranks = runs.masked_fill(_is_repeated(runs), -ep)
        if tp > 1:
            ranks = (ranks[..., None] * tp + torch.arange(tp, device=runs.device)).flatten(1)
        room = self._kernels.order(ranks, ep * tp, ranks.numel())
        choices = torch.cat([shares, experts.to(shares.dtype)], dim=1)  # float32 has all numbers of experts
        numbers = sizes()  # as late as it can be
        sent, received, copies = numbers[: ep * tp], numbers[ep * tp : -1], numbers[-1]
        order = room.cut(sum(sent))
        of_tokens, of_choices = (_Travel(self._group, sent, received) for _ in range(2))
        travelling, chosen = (
            way.begun(rows_of(what, order, self._kernels)) for way, what in ((of_tokens, tokens), (of_choices, choices))
        )
        first = self._place.ep_rank * self._num_held

        def arrived() -> Arrived:
            theirs, all_numbers = of_choices.ended(chosen).chunk(2, dim=1)
            own = all_numbers.detach().to(experts.dtype) - first
            return Arrived(of_tokens.ended(travelling), theirs, own, copies)

        def back(outputs: Tensor) -> Tensor:
            return self._returned(outputs, order, received, sent)

        return Sent(arrived, back)

    def _returned(self, outputs: Tensor, order: ExpertOrder, received: list[int], sent: list[int]) -> Tensor:
        travel = _Travel(self._group, received, sent)
        return sums_of(travel.ended(travel.begun(outputs)), order, self._kernels)


def _is_repeated(runs: Tensor) -> Tensor:
    """(t, k) bool: whether an earlier choice of the token is of the same run."""
    k = runs.shape[1]
    earlier = torch.ones(k, k, dtype=torch.bool, device=runs.device).tril(-1)
    return ((runs[:, :, None] == runs[:, None, :]) & earlier).any(2)


def _copies_of(runs: Tensor, ep: int) -> Tensor:
    """(ep,) int64: choices of each run."""
    return (runs.flatten() == torch.arange(ep, device=runs.device)[:, None]).sum(1)


def _tokens_of(runs: Tensor, ep: int) -> Tensor:
    """(ep,) int64: tokens with a choice of each run."""
    return (runs == torch.arange(ep, device=runs.device)[:, None, None]).any(2).sum(1)


class _Travel:
    """One message of rows to each rank of a group, and of their gradients back. What is launched between `begun` and
    `ended` runs beside the message, in the backward pass too."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> None:
        self._group, self._sent, self._received = group, sent, received
        self._under_way: tuple[dist.Work, Tensor] | None = None

    def begun(self, rows: Tensor) -> Tensor:
        """(sum(sent), size) -> (sum(received), size), to be read behind `ended`."""
        begun: Tensor = _Begin.apply(rows, self)
        return begun

    def ended(self, rows: Tensor) -> Tensor:
        """What `begun` gave, when it has arrived."""
        ended: Tensor = _End.apply(rows, self)
        return ended

    def launch(self, rows: Tensor, *, backward: bool) -> Tensor:
        """Where rows arrive."""
        sent, received = (self._received, self._sent) if backward else (self._sent, self._received)
        arrives = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(arrives, rows.contiguous(), received, sent, group=self._group, async_op=True)
        self._under_way = work, arrives
        return arrives

    def wait(self) -> Tensor:
        """The rows that have arrived."""
        assert self._under_way is not None, "nothing travels"
        (work, arrived), self._under_way = self._under_way, None
        work.wait()
        return arrived


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        return travel.launch(rows, backward=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        travel.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """autograd wants a gradient of the shape of what has arrived. What travels goes by `ctx.travel`."""
        ctx.travel.launch(grad, backward=True)
        return grad, None
