"""Make a sharded result whole: every rank that needs it ends with the same global tensor, bit for bit.

A role computes the part of a replica and returns it at once; the exchange comes where the result is needed. Ranks
outside the role's grid go straight on, so that roles on disjoint ranks run at the same time. Each element is computed
by one replica and contributed by one rank of it; the others add zero, and x + 0 = x exactly. The time spent here is
time spent waiting for the slowest rank plus the transfer of a few bytes a token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.device import wait_for

PIECE_BYTES = 1 << 26  # of a large tensor under way: what the device has room for beside everything else


@dataclass(frozen=True)
class PartialTensor:
    """What this rank knows of a (size,) tensor: values[i] at where[i]; nothing on ranks that compute none of it."""

    size: int
    where: Tensor  # (n,) int64, disjoint between ranks
    values: Tensor  # (n,), of one dtype on every rank

    @classmethod
    def empty(cls, size: int, dtype: torch.dtype = torch.float32) -> "PartialTensor":
        return cls(size, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=dtype))

    def parts(self) -> "tuple[PartialTensor, ...]":
        return (self,)

    def put_together(self, wholes: Sequence[Tensor]) -> Tensor:
        """See `flows.run.Pending`."""
        return wholes[0]


@dataclass
class Exchange:
    """Exchanges over the world's `group`. `seconds` counts what this rank has spent in them."""

    group: dist.ProcessGroup
    device: torch.device
    seconds: float = field(default=0.0)

    def gather(self, contribution: PartialTensor) -> Tensor:
        """(size,) tensor on the CPU holding every rank's values, zero where no rank has one."""
        return self.gather_all([contribution])[0]

    def gather_all(self, contributions: Sequence[PartialTensor]) -> list[Tensor]:
        """Several at once, of one dtype: one collective of all ranks."""
        sizes = [x.size for x in contributions]
        return list(self.sum(self._laid_out(contributions)).cpu().split(sizes))

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send bytes to each rank of the group; what each sends here, piece by piece.

        outgoing: by rank (n,) uint8 on the CPU. sizes: by rank the number of bytes that arrive, (n,) uint8 on the CPU.
        """
        started = time.perf_counter()
        incoming = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        largest = torch.tensor(max(map(len, (*outgoing, *incoming))), device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        step = max(PIECE_BYTES // self.group.size(), 1)
        for start in range(0, int(largest), step):
            there, here = ([x[start : start + step] for x in messages] for messages in (outgoing, incoming))
            received = torch.empty(sum(map(len, here)), dtype=torch.uint8, device=self.device)
            sent = torch.cat(there).to(self.device)
            dist.all_to_all_single(received, sent, [*map(len, here)], [*map(len, there)], group=self.group)
            for target, part in zip(here, received.cpu().split([*map(len, here)]), strict=True):
                target.copy_(part)
        self.seconds += time.perf_counter() - started
        return incoming

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def mean(self, value: float) -> float:
        """The mean of a number over the ranks."""
        total = self.sum(torch.tensor(value, dtype=torch.float64, device=self.device))
        return float(total) / self.group.size()

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum over the ranks, in place."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _laid_out(self, contributions: Sequence[PartialTensor]) -> Tensor:
        """What this rank knows, one after the other, zero elsewhere."""
        flat = torch.zeros(sum(x.size for x in contributions), dtype=contributions[0].values.dtype, device=self.device)
        for x, result in zip(contributions, flat.split([x.size for x in contributions]), strict=True):
            assert x.values.dtype == flat.dtype, f"{x.values.dtype} among {flat.dtype}"
            result.scatter_(0, x.where.to(self.device), x.values.to(self.device))
        return flat

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        started = time.perf_counter()
        dist.all_reduce(values, op=op, group=self.group)
        wait_for(values.device)  # else the wait would be counted where the result is read
        self.seconds += time.perf_counter() - started
        return values
