"""Log-probabilities and entropy of logits that are split over the vocabulary.

megatron's own vocabulary-parallel cross entropy works on the global tensor-parallel group and overwrites its input;
here the group is given. Work goes in chunks of rows, so that no float32 copy of all logits ever exists: what is kept
for the backward pass are the logits themselves, and the backward pass writes their gradient over them.

With z = logits / temperature, m = max z, over the true vocabulary (padding columns take no part):
    log p(y) = z_y - logsumexp(z)            H = logsumexp(z) - sum_j p_j z_j
    d log p(y) / d z_j = [j = y] - p_j       d H / d z_j = -p_j (log p_j + H)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.cpu.kernels import vocabulary
from hybridflow.cpu.kernels.threads import takes

Temperature = float | Tensor  # of all rows, or (R,)
# logits handled at a time, by device, of which up to three float32 copies exist: on a CPU 4 MiB each, which stay in its
# caches; on a GPU 256 MiB each: a chunk takes some twenty kernels, whose launches would else take longer than they
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
NUM_COPIES = 3


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, *, group: dist.ProcessGroup, vocab_size: int, temperature: Temperature
) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy), both (R,) float32, in nats.

    logits: (R, padded vocabulary / tp), this rank's columns; consumed: after backward they hold their gradient.
    targets: (R,) int64 ids below vocab_size. group: the tensor-parallel group the columns are split over.
    temperature: of all rows, or float32 (R,), of each.
    """
    assert logits.dim() == 2 and targets.shape == logits.shape[:1], f"{tuple(logits.shape)}, {tuple(targets.shape)}"
    both: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(logits, targets, group, vocab_size, temperature)
    return both


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: Temperature
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * logits.shape[1]
        columns = max(0, min(logits.shape[1], vocab_size - first))  # true columns on this rank
        local, mine = _local_targets(targets, first, columns)
        ctx.native = columns > 0 and takes(logits) and logits.stride(1) == 1
        if ctx.native:
            local = torch.where(mine, local, -1)
            own_peak, sums = vocabulary.partial_sums(logits, columns, local, _divisors(temperature))
            peak = own_peak.clone()
        else:
            peak = _row_max(logits, columns, temperature)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        if ctx.native:
            sums = _below(peak, own_peak, sums, mine)
        else:
            sums = _partial_sums(logits, columns, temperature, peak=peak, local=local, mine=mine)
        dist.all_reduce(sums, group=group)
        exp_sum, weighted, target = sums  # of exp(z - m), exp(z - m)(z - m), and z_y - m
        log_norm = exp_sum.log()
        entropy = log_norm - weighted / exp_sum
        ctx.save_for_backward(logits, local, mine, peak + log_norm, entropy)
        ctx.columns, ctx.temperature = columns, temperature
        ctx.set_materialize_grads(False)
        return target - log_norm, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        logits, local, mine, log_normalizer, entropy = ctx.saved_tensors
        if ctx.native:
            vocabulary.gradients(
                logits,
                ctx.columns,
                local,
                _divisors(ctx.temperature),
                normalizer=log_normalizer,
                entropy=entropy,
                grad_log_probs=grad_log_probs,
                grad_entropy=grad_entropy,
            )
            return logits, None, None, None, None
        for rows in _row_chunks(logits):
            divisor = _of_rows(ctx.temperature, rows)
            log_p = logits[rows, : ctx.columns].float().div_(divisor).sub_(log_normalizer[rows, None])
            p = log_p.exp()
            grad = torch.zeros_like(p)
            if grad_log_probs is not None:
                g = grad_log_probs[rows].float()
                grad.addcmul_(p, g[:, None], value=-1.0)
                if ctx.columns:
                    grad.scatter_add_(1, local[rows, None], (g * mine[rows])[:, None])
            if grad_entropy is not None:
                g = grad_entropy[rows].float()
                grad.addcmul_(p.mul_(log_p.add_(entropy[rows, None])), g[:, None], value=-1.0)
            logits[rows, : ctx.columns] = grad.div_(divisor).to(logits.dtype)
        logits[:, ctx.columns :] = 0
        return logits, None, None, None, None


def _divisors(temperature: Temperature) -> Tensor:
    return temperature.contiguous() if isinstance(temperature, Tensor) else torch.tensor([temperature])


def _below(peak: Tensor, own: Tensor, sums: Tensor, mine: Tensor) -> Tensor:
    """This rank's (3, R) sums of what logits are below its own maximum, below that of all ranks."""
    exp_sum, weighted, target = sums
    lower = own - peak
    factor = lower.exp()
    return torch.stack((exp_sum * factor, (weighted + exp_sum * lower) * factor, target + lower * mine))


def _of_rows(temperature: Temperature, rows: slice) -> Temperature:
    """What logits of these rows are divided by: a number, or (rows, 1)."""
    return temperature[rows, None] if isinstance(temperature, Tensor) else temperature


def rows_of_chunk(columns: int, device: str) -> int:
    return max(1, CHUNK_ELEMENTS[device] // columns)


def _row_chunks(logits: Tensor) -> list[slice]:
    step = rows_of_chunk(logits.shape[1], logits.device.type)
    return [slice(i, i + step) for i in range(0, logits.shape[0], step)]


def _local_targets(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank (0 where it is elsewhere), and whether it is here."""
    local = targets - first
    mine = (local >= 0) & (local < columns)
    return local.masked_fill(~mine, 0), mine


def _row_max(logits: Tensor, columns: int, temperature: Temperature) -> Tensor:
    if columns == 0 or logits.shape[0] == 0:
        return logits.new_full((logits.shape[0],), -torch.inf, dtype=torch.float32)
    return logits.detach()[:, :columns].amax(dim=1).float() / temperature


def _partial_sums(
    logits: Tensor, columns: int, temperature: Temperature, *, peak: Tensor, local: Tensor, mine: Tensor
) -> Tensor:
    """(3, R): this rank's part of sum exp(z - m), sum exp(z - m)(z - m), and z_y - m."""
    sums = torch.zeros(3, logits.shape[0], device=logits.device)
    if columns == 0:
        return sums
    for rows in _row_chunks(logits):
        z = logits.detach()[rows, :columns].to(torch.float32, copy=True)
        z.div_(_of_rows(temperature, rows)).sub_(peak[rows, None])
        sums[2, rows] = z.gather(1, local[rows, None]).squeeze(1) * mine[rows]
        e = z.exp()
        sums[0, rows] = e.sum(dim=1)
        sums[1, rows] = e.mul_(z).sum(dim=1)
    return sums
