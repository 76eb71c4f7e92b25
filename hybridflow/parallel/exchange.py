"""Make a sharded result whole: every rank ends with the same global tensor, bit for bit.

A role computes the part of its replica and returns it at once; the exchange comes where the result is needed. Ranks
outside the role's grid go straight on, so that roles on disjoint ranks run at the same time. Each element is computed
by one replica and contributed by one rank of it; the others add zero, and x + 0 = x exactly. The time spent here is
time spent waiting for the slowest rank plus the transfer of a few bytes a token.
"""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """What this rank knows of a (size,) tensor: values[i] at where[i]. A rank that does not speak knows nothing."""

    size: int
    where: Tensor  # (n,) int64, disjoint between ranks
    values: Tensor  # (n,), of one dtype on every rank

    @classmethod
    def nothing(cls, size: int, dtype: torch.dtype = torch.float32) -> "Part":
        return cls(size, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=dtype))


@dataclass
class Exchange:
    """Exchanges over `group`. `seconds` counts what this rank has spent in them."""

    group: dist.ProcessGroup
    device: torch.device
    seconds: float = field(default=0.0)

    def whole(self, part: Part) -> Tensor:
        """(size,) tensor on the CPU holding every rank's values, zero where no rank has one."""
        return self.wholes([part])[0]

    def wholes(self, parts: list[Part]) -> list[Tensor]:
        """Several at once, of one dtype: one collective."""
        sizes = [part.size for part in parts]
        flat = torch.zeros(sum(sizes), dtype=parts[0].values.dtype, device=self.device)
        for part, result in zip(parts, flat.split(sizes), strict=True):
            assert part.values.dtype == flat.dtype, f"{part.values.dtype} among {flat.dtype}"
            result[part.where.to(self.device)] = part.values.to(self.device)
        return list(self.summed(flat).cpu().split(sizes))

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def mean(self, value: float) -> float:
        """The mean of a number over the ranks."""
        total = self.summed(torch.tensor(value, dtype=torch.float64, device=self.device))
        return float(total) / self.group.size()

    def maximum(self, values: Tensor) -> Tensor:
        """The maximum over the ranks, in place."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, op: dist.ReduceOp) -> Tensor:
        started = time.perf_counter()
        dist.all_reduce(values, op=op, group=self.group)
        if values.is_cuda:
            torch.cuda.synchronize(values.device)  # else the wait would be counted where the result is read
        self.seconds += time.perf_counter() - started
        return values
