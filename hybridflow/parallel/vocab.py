"""Log-probabilities and entropy of logits that are split over the vocabulary.

megatron's own vocabulary-parallel cross entropy works on the global tensor-parallel group and overwrites the input;
here the group is given. No float32 copy of all logits ever exists: kernels make none, and torch works in chunks of
rows. What is kept for the backward pass are the logits themselves, and the backward pass writes their gradient over
them. Where even they are too many, `models.output_layer` makes them in chunks, too.

With z = logits / temperature, m = max z, over the true vocabulary (padding columns take no part):
    log p(y) = z_y - logsumexp(z)            H = logsumexp(z) - sum_j p_j z_j
    d log p(y) / d z_j = [j = y] - p_j       d H / d z_j = -p_j (log p_j + H)
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.cpu.kernels import vocabulary
from hybridflow.cpu.kernels.library import library
from hybridflow.parallel import vocab_triton
from hybridflow.parallel.device import uses_cuda

Temperature = float | Tensor  # of all rows, or (R,)
# logits that torch handles at a time, by device, of which float32 copies exist, two forward and three backward: on a
# CPU 4 MiB each, which stay in caches; on a GPU without Triton 256 MiB each: a chunk takes some twenty kernels, whose
# launches would else take longer than they
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
FORWARD_COPIES, BACKWARD_COPIES = 2, 3
LOGITS_AT_ONCE = 1 << 28  # that exist: 512 MiB in bfloat16, 1 GiB in float32


class Gradients(Protocol):
    """Write those of log-probs g and of the entropy H, h, over the logits; 0 in the padding.

    (g ([j = y] - p_j) - h p_j (log p_j + H)) / divisor, with log p_j = z_j - normalizer.
    """

    def __call__(
        self,
        logits: Tensor,
        columns: int,
        targets: Tensor,
        divisors: Tensor,
        *,
        normalizer: Tensor,
        entropy: Tensor,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None: ...


class VocabKernels(NamedTuple):
    """What this rank computes of its columns of some rows. The first `columns`, at least one, are the vocabulary's.

    partial_sums(logits, columns, targets, divisors) -> (m, sums) of z = logits / divisor: m = max z, (R,), and, (3, R),
    sum exp(z - m), sum exp(z - m)(z - m) and z_y - m. A target that is none of the columns is negative, and the term 0.
    divisors: (R,) float32.
    """

    partial_sums: Callable[[Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor]]
    gradients: Gradients


def vocab_kernels() -> VocabKernels:
    """By the device: on a GPU where Triton is there, on a CPU where kernels in C are, on which ranks have agreed."""
    if uses_cuda():
        return BY_TRITON if vocab_triton.HAS_TRITON else by_torch("cuda")
    if library() is None:
        return by_torch("cpu")
    return VocabKernels(vocabulary.partial_sums, vocabulary.gradients)


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: Temperature,
    kernels: VocabKernels,
) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy), both (R,) float32, in nats.

    logits: (R, padded vocabulary / tp), this rank's columns; consumed: after backward they hold their gradient.
    targets: (R,) int64 ids below vocab_size. group: the tensor-parallel group the columns are split over.
    temperature: of all rows, or float32 (R,), of each. kernels: see `vocab_kernels`.
    """
    assert logits.dim() == 2 and targets.shape == logits.shape[:1], f"{tuple(logits.shape)}, {tuple(targets.shape)}"
    own = OwnColumns(logits.shape[1], group=group, vocab_size=vocab_size, kernels=kernels)
    both: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(logits, targets, temperature, own)
    return both


class OwnColumns:
    """This rank's columns of the logits, and what the rank takes from the group's others to make results of them.

    num_columns: padded vocabulary / tp, of which the last rank's last may lie past the vocabulary.
    """

    def __init__(self, num_columns: int, *, group: dist.ProcessGroup, vocab_size: int, kernels: VocabKernels) -> None:
        self._first, self._group, self._kernels = group.rank() * num_columns, group, kernels
        self._columns = max(0, min(num_columns, vocab_size - self._first))  # true columns on this rank

    def local(self, targets: Tensor) -> Tensor:
        """(R,): which of the columns a target is; -1 where it is another rank's."""
        local = targets - self._first
        return torch.where((local >= 0) & (local < self._columns), local, -1)

    def partial_sums(self, logits: Tensor, local: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
        """As `VocabKernels`; of no column the largest is -inf."""
        if self._columns and len(logits):
            return self._kernels.partial_sums(logits.detach(), self._columns, local, divisors)
        rows, device = len(logits), logits.device
        return torch.full((rows,), -torch.inf, device=device), torch.zeros(3, rows, device=device)

    def combined(self, own_peak: Tensor, sums: Tensor, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs, entropy, logsumexp), each (R,), of all ranks' partial sums. Collective over the group."""
        peak = own_peak.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self._group)
        sums = _below(peak, own_peak, sums, local >= 0)
        dist.all_reduce(sums, group=self._group)
        exp_sum, weighted, target = sums  # of exp(z - m), exp(z - m)(z - m), and z_y - m
        log_norm = exp_sum.log()
        return target - log_norm, log_norm - weighted / exp_sum, peak + log_norm

    def write_gradients(self, logits: Tensor, local: Tensor, divisors: Tensor, **of_rows: Tensor | None) -> None:
        """Over the logits. of_rows: see `Gradients`."""
        if self._columns and len(logits):
            self._kernels.gradients(logits, self._columns, local, divisors, **of_rows)  # type: ignore[arg-type]
        else:
            logits.zero_()

    def sum(self, x: Tensor) -> None:
        """In place, over the group."""
        dist.all_reduce(x, group=self._group)


def divisors_of(temperature: Temperature, rows: Tensor) -> Tensor:
    """(R,) float32: what the logits of each row are divided by."""
    if isinstance(temperature, Tensor):
        return temperature.contiguous()
    return torch.full(rows.shape[:1], temperature, dtype=torch.float32, device=rows.device)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Temperature, own: OwnColumns
    ) -> tuple[Tensor, Tensor]:
        local, divisors = own.local(targets), divisors_of(temperature, logits)
        log_probs, entropy, normalizer = own.combined(*own.partial_sums(logits, local, divisors), local)
        ctx.save_for_backward(logits, local, divisors, normalizer, entropy)
        ctx.own = own
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, local, divisors, normalizer, entropy = ctx.saved_tensors
        ctx.own.write_gradients(
            logits,
            local,
            divisors,
            normalizer=normalizer,
            entropy=entropy,
            grad_log_probs=grad_log_probs,
            grad_entropy=grad_entropy,
        )
        return logits, None, None, None


def _below(peak: Tensor, own: Tensor, sums: Tensor, mine: Tensor) -> Tensor:
    """This rank's (3, R) sums of what logits are below the rank's maximum, below that of all ranks."""
    exp_sum, weighted, target = sums
    lower = own - peak
    factor = lower.exp()
    # a rank without columns is infinitely below the others, and has nothing to add
    weighted = torch.where(factor > 0, (weighted + exp_sum * lower) * factor, 0.0)
    return torch.stack((exp_sum * factor, weighted, torch.where(mine, target + lower, 0.0)))


BY_TRITON = VocabKernels(vocab_triton.partial_sums, vocab_triton.gradients)


# ------------------------------------------------------------------------------------------------ by torch


def by_torch(device: str) -> VocabKernels:
    """In chunks of rows that suit the kind of device."""
    return VocabKernels(partial(_partial_sums, device), partial(_gradients, device))


def chunks_of_rows(rows: int, columns: int) -> list[slice]:
    """Rows whose logits exist at once, of a rank's columns: in as few chunks as can be, nearly alike in size."""
    count = ceil(rows / max(1, LOGITS_AT_ONCE // columns))
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def rows_of_chunk(columns: int, device: str) -> int:
    return max(1, CHUNK_ELEMENTS[device] // columns)


def _row_chunks(logits: Tensor, device: str) -> list[slice]:
    step = rows_of_chunk(logits.shape[1], device)
    return [slice(i, i + step) for i in range(0, logits.shape[0], step)]


def _partial_sums(
    device: str, logits: Tensor, columns: int, targets: Tensor, divisors: Tensor
) -> tuple[Tensor, Tensor]:
    peak = logits.new_empty(logits.shape[:1], dtype=torch.float32)
    sums = peak.new_empty(3, len(peak))
    for rows in _row_chunks(logits, device):
        z = logits[rows, :columns].to(torch.float32, copy=True).div_(divisors[rows, None])
        peak[rows] = z.amax(dim=1)
        z.sub_(peak[rows, None])
        of_target = z.gather(1, targets[rows, None].clamp(min=0)).squeeze(1)
        sums[2, rows] = torch.where(targets[rows] >= 0, of_target, 0.0)
        e = z.exp()
        sums[0, rows] = e.sum(dim=1)
        sums[1, rows] = e.mul_(z).sum(dim=1)
        del z, e  # else they are there beside the next
    return peak, sums


def _gradients(
    device: str,
    logits: Tensor,
    columns: int,
    targets: Tensor,
    divisors: Tensor,
    *,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    for rows in _row_chunks(logits, device):
        divisor = divisors[rows, None]
        log_p = logits[rows, :columns].float().div_(divisor).sub_(normalizer[rows, None])
        p = log_p.exp()
        grad = torch.zeros_like(p)
        if grad_log_probs is not None:
            g = grad_log_probs[rows].float()
            grad.addcmul_(p, g[:, None], value=-1.0)
            here = targets[rows] >= 0
            grad.scatter_add_(1, targets[rows, None].clamp(min=0), (g * here)[:, None])
        if grad_entropy is not None:
            g = grad_entropy[rows].float()
            grad.addcmul_(p.mul_(log_p.add_(entropy[rows, None])), g[:, None], value=-1.0)
        logits[rows, :columns] = grad.div_(divisor)
        del log_p, p, grad
    logits[:, columns:] = 0
