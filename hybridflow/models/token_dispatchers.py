"""Which way tokens take to their experts: chosen once, when a model is built, and alike on all ranks.

DeepEP (github.com/deepseek-ai/DeepEP) sends a token once to each rank that holds one of the token's experts, over
NVLink within a host and RDMA between hosts. Dispatch's gradient is DeepEP's combine, and combine's gradient its
dispatch. DeepEP tells the host sizes: once a layer the host waits for numbers of the GPU's.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor

from hybridflow.errors import EnvironmentProblem
from hybridflow.models.expert_dispatch import AllToAll, Arrived, Sent, TokenDispatcher, WithinReplica
from hybridflow.models.layer_classes import DispatcherName, asks_for_deep_ep, expert_kernels
from hybridflow.parallel.agreement import failures
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.layout import Place


def token_dispatcher(config: TransformerConfig, grid: Grid, wanted: DispatcherName) -> TokenDispatcher:
    """Of a mixture. Collective over the ranks that share the experts, where these are of several replicas.

    Errors: EnvironmentProblem on all of these where DeepEP is wanted and one of them cannot have it, with its reason.
    """
    place, num_experts = grid.place("experts"), not_none(config.num_moe_experts)
    num_held = num_experts // place.ep
    if grid.layout.dense_per_expert_copy == 1:
        sequence_parallel = config.sequence_parallel
        return WithinReplica(place, num_held, grid.groups.tp, sequence_parallel=sequence_parallel)
    group = grid.groups.tp_ep
    if asks_for_deep_ep(wanted):
        missing = failures(why_not_deep_ep(place, config.params_dtype, config.hidden_size), group)
        if not missing:
            return DeepEP(group, num_experts)
        if wanted == "deepep":
            raise EnvironmentProblem(f"token_dispatcher: deepep: {'; '.join(missing)}. Write token_dispatcher: auto")
    return AllToAll(place, num_held, group, expert_kernels(kept=True))


HIDDEN_MULTIPLE = 8  # DeepEP copies 16 bytes at a time
HOST = 8  # GPUs of a host, of which there are whole ones


def why_not_deep_ep(place: Place, dtype: torch.dtype, hidden_size: int) -> str | None:
    """What stands against DeepEP for such a model on this rank; None: nothing."""
    ranks = place.tp * place.ep
    if not fused_a2a.HAVE_DEEP_EP:
        return "deep_ep cannot be imported"
    if place.tp > 1:
        return f"each expert is cut over {place.tp} ranks, and DeepEP sends a choice to one rank"
    if dtype != torch.bfloat16:
        return f"the model is in {str(dtype).removeprefix('torch.')}, and DeepEP adds in bfloat16"
    if hidden_size % HIDDEN_MULTIPLE:
        return f"DeepEP takes hidden sizes that are multiples of {HIDDEN_MULTIPLE}, this one is {hidden_size}"
    if ranks > HOST and ranks % HOST:
        return f"DeepEP takes up to {HOST} ranks or a multiple of {HOST}, these are {ranks}"
    return None


class DeepEP:
    """See `expert_dispatch.TokenDispatcher`. The ranks of `group` hold runs of whole experts, in its order."""

    sends = True

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self._group, self._num_experts = group, num_experts

    def tokens(self, hidden: Tensor) -> Tensor:
        """See `TokenDispatcher`."""
        return hidden.flatten(0, -2)

    def dispatch(self, tokens: Tensor, shares: Tensor, experts: Tensor) -> Sent:
        """See `TokenDispatcher`."""
        trip = _Trip(self._group, self._num_experts)
        there, theirs, own = _Dispatch.apply(tokens, shares, experts, trip)

        def arrived() -> Arrived:
            trip.event.current_stream_wait()
            return Arrived(there, theirs, own, trip.num_copies)

        def back(outputs: Tensor) -> Tensor:
            summed: Tensor = _Combine.apply(outputs, trip)
            return summed

        return Sent(arrived, back)


class _Trip:
    """One layer's tokens there and back. handle, event, num_copies: known when tokens are on their way."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self.group, self.num_experts = group, num_experts
        self.handle: Any = None
        self.event: Any = None
        self.num_copies = 0

    def buffer(self, rows: Tensor) -> Any:
        """DeepEP's, of the process, for rows of this size."""
        return fused_a2a.get_buffer(self.group, fused_a2a.get_hidden_bytes(rows))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, shares: Tensor, experts: Tensor, trip: _Trip
    ) -> tuple[Tensor, Tensor, Tensor]:
        from deep_ep.utils import EventHandle, EventOverlap

        ctx.trip = trip
        tokens, buffer = tokens.contiguous(), trip.buffer(tokens)
        beside = {"async_finish": True, "allocate_on_comm_stream": True}
        launched = EventOverlap(EventHandle())  # what is launched so far comes first
        by_rank, by_host, by_expert, goes_to, event = buffer.get_dispatch_layout(
            experts, trip.num_experts, previous_event=launched, **beside
        )
        there, own, theirs, copies, trip.handle, trip.event = buffer.dispatch(
            tokens,
            topk_idx=experts,
            topk_weights=shares.float(),
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_host,
            is_token_in_rank=goes_to,
            num_tokens_per_expert=by_expert,
            previous_event=event,
            **beside,
        )
        trip.num_copies = sum(copies)
        ctx.mark_non_differentiable(own)
        return there, theirs, own

    @staticmethod
    def backward(ctx: Any, grad_tokens: Tensor, grad_shares: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        trip, grad_tokens = ctx.trip, grad_tokens.contiguous()
        tokens, shares, _event = trip.buffer(grad_tokens).combine(
            grad_tokens, trip.handle, topk_weights=grad_shares.float().contiguous()
        )
        return tokens, shares, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, trip: _Trip) -> Tensor:
        ctx.trip, outputs = trip, outputs.contiguous()
        combined: Tensor = trip.buffer(outputs).combine(outputs, trip.handle)[0]
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        trip, grad = ctx.trip, grad.contiguous()
        return trip.buffer(grad).dispatch(grad, handle=trip.handle)[0], None
