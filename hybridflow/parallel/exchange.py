"""Make a sharded result whole: every rank ends with the same global tensor, bit for bit.

Each element is computed by one replica and contributed by one rank of it; the others add zero, and x + 0 = x exactly.
The time spent here is time spent waiting for the slowest rank plus the transfer of a few bytes a token.
"""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Exchange:
    """Exchanges over `group`. `seconds` counts what this rank has spent in them."""

    group: dist.ProcessGroup
    device: torch.device
    seconds: float = field(default=0.0)

    def whole(self, size: int, where: Tensor, values: Tensor, *, speaks: bool) -> Tensor:
        """(size,) tensor on the CPU holding values[i] at where[i] for every speaking rank, zero elsewhere.

        where: (n,) int64, disjoint between speaking ranks. values: (n,), its dtype alike on every rank.
        """
        result = torch.zeros(size, dtype=values.dtype, device=self.device)
        if speaks:
            result[where.to(self.device)] = values.to(self.device)
        return self.summed(result).cpu()

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        started = time.perf_counter()
        dist.all_reduce(values, group=self.group)
        self.seconds += time.perf_counter() - started
        return values

    def mean(self, value: float) -> float:
        """The mean of a number over the ranks."""
        total = self.summed(torch.tensor(value, dtype=torch.float64, device=self.device))
        return float(total) / self.group.size()

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum over the ranks, in place."""
        started = time.perf_counter()
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        self.seconds += time.perf_counter() - started
        return values
