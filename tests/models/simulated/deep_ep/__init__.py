"""A stand-in of DeepEP on gloo: the calls that training makes, with DeepEP's arguments, results and order of tokens.

What arrives is there only when the event has been waited for: until then it is NaN. DeepEP's own checks of types are
made; its buffers are sizes alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.utils import EventOverlap


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


@dataclass
class Handle:
    """tokens: of those that this rank sends, by rank and in their order; counts: how many go to and come from each."""

    tokens: Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int


class Buffer:
    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.calls: list[str] = []

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        *,
        previous_event: Any,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        assert not allocate_on_comm_stream or (previous_event is not None and async_finish)
        ranks = topk_idx // (num_experts // self.group.size())
        goes_to = (ranks[:, :, None] == torch.arange(self.group.size())).any(1)
        by_expert = (topk_idx.flatten()[:, None] == torch.arange(num_experts)).sum(0)
        return goes_to.sum(0).int(), None, by_expert.int(), goes_to, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] * 2 % 16 == 0
        self.calls.append("dispatch")
        if handle is not None:
            event = EventOverlap()
            there = self._travelled(x[handle.tokens], handle.sent, handle.received, event)
            return there, None, None, None, None, self._finished(event, async_finish)
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        size, held = self.group.size(), len(num_tokens_per_expert) // self.group.size()
        tokens = torch.cat([goes.nonzero().flatten() for goes in is_token_in_rank.T])
        sent = num_tokens_per_rank.tolist()
        counts = torch.empty(size, dtype=torch.int64)
        dist.all_to_all_single(counts, num_tokens_per_rank.long(), group=self.group)
        received, event = counts.tolist(), EventOverlap()
        first = torch.arange(size).repeat_interleave(num_tokens_per_rank.long())[:, None] * held
        own = topk_idx[tokens] - first
        is_own = (own >= 0) & (own < held)
        there = self._travelled(x[tokens], sent, received, event)
        numbers = self._travelled(torch.where(is_own, own, -1), sent, received, EventOverlap(), now=True)
        shares = self._travelled(torch.where(is_own, topk_weights[tokens], 0.0), sent, received, event)
        by_expert = [int((numbers == expert).sum()) for expert in range(held)]
        handle = Handle(tokens, sent, received, len(x))
        return there, numbers, shares, by_expert, handle, self._finished(event, async_finish)

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums in float32 in the order of ranks, rounded once."""
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) == sum(handle.received)
        assert topk_weights is None or topk_weights.dtype == torch.float32
        self.calls.append("combine")
        summed = [
            None
            if each is None
            else torch.zeros(handle.num_tokens, each.shape[1])
            .index_add_(0, handle.tokens, self._back(each, handle).float())
            .to(each.dtype)
            for each in (x, topk_weights)
        ]
        return summed[0], summed[1], self._finished(EventOverlap(), async_finish)

    def _back(self, rows: Tensor, handle: Handle) -> Tensor:
        return self._travelled(rows, handle.received, handle.sent, EventOverlap(), now=True)

    def _travelled(
        self, rows: Tensor, sent: list[int], received: list[int], event: EventOverlap, *, now: bool = False
    ) -> Tensor:
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self.group)
        if now:
            return arrived
        shown = torch.full_like(arrived, torch.nan)
        event.at_wait.append(lambda: shown.data.copy_(arrived))  # as a kernel writes, unseen by autograd
        return shown

    @staticmethod
    def _finished(event: EventOverlap, async_finish: bool) -> EventOverlap:
        if not async_finish:
            event.current_stream_wait()
        return event
