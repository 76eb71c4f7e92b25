"""What one rank does: products by shape, attention, log-probs of logits, and passes over memory."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import grouped_mm, linear

from hybridflow.automap.role_time import BACKWARD_ATTENTION
from hybridflow.models.attention import PackedSequences
from hybridflow.models.layer_classes import attention_functions
from hybridflow.models.layer_specs import DTYPES
from hybridflow.parallel.vocab import vocab_kernels, vocab_parallel_log_probs

ROWS = {"cpu": (1, 4, 16, 64, 256, 1024, 4096), "cuda": (1, 4, 16, 64, 256, 1024, 4096, 16384)}
COLUMNS = {  # (k, n) of weights
    "cpu": (
        (64, 64),
        (64, 256),
        (256, 64),
        (192, 576),
        (256, 1024),
        (1024, 256),
        (512, 512),
        (1024, 1024),
        (256, 4096),
    ),
    "cuda": ((512, 512), (1024, 4096), (4096, 1024), (4096, 4096), (4096, 16384), (16384, 4096), (8192, 8192)),
}
GRADIENT_OF = (64, 256, 1024, 4096)  # rows of which the products of a weight's gradient are measured: they are k there
CACHE_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}  # more than the largest cache holds
MOST_WEIGHTS = 2048
GROUPED = {"cpu": (16, 64, 256, 256), "cuda": (64, 512, 2048, 1536)}  # experts, rows of each, k, n
STREAM_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
HEADS, HEAD_DIM = 8, 64
LENGTHS = {"cpu": (8, 192), "cuda": (8, 2048)}  # sequences, tokens of each
LOGITS = {"cpu": (256, 4096), "cuda": (4096, 32768)}

Row = tuple[int, int, int, float]


def product_table(dtype: str, device: torch.device) -> Iterator[Row]:
    """(m, k, n, FLOP/s) of x W^T with a weight that is in no cache, as in a model of many layers; and of the products
    of a weight's gradient."""
    for k, n in COLUMNS[device.type]:
        size = k * n * DTYPES[dtype].itemsize
        count = min(max(1, CACHE_BYTES[device.type] // size), MOST_WEIGHTS)
        weights = torch.randn(count, n, k, dtype=DTYPES[dtype], device=device)
        for m in ROWS[device.type]:
            x = torch.randn(m, k, dtype=DTYPES[dtype], device=device)
            turn = itertools.cycle(weights)
            seconds = seconds_of(partial(_product, x, turn), least=0.01, device=device)
            yield m, k, n, 2.0 * m * k * n / seconds
        for m in GRADIENT_OF:
            x, grad = (torch.randn(m, width, dtype=DTYPES[dtype], device=device) for width in (k, n))
            seconds = seconds_of(partial(torch.mm, grad.t(), x), least=0.01, device=device)
            yield n, m, k, 2.0 * m * k * n / seconds


def _product(x: torch.Tensor, weights: Iterator[torch.Tensor]) -> torch.Tensor:
    return linear(x, next(weights))


def grouped_efficiency(dtype: str, device: torch.device) -> float:
    """Of the products of several experts in one kernel: seconds of as many single products over the kernel's."""
    count, m, k, n = GROUPED[device.type]
    weights = torch.randn(count, n, k, dtype=DTYPES[dtype], device=device)
    x = torch.randn(count * m, k, dtype=DTYPES[dtype], device=device)
    ends = torch.arange(m, count * m + 1, m, dtype=torch.int32, device=device)
    turn = itertools.cycle(weights)
    alone = seconds_of(partial(_product, x[:m], turn), least=0.01, device=device)
    together = seconds_of(partial(grouped_mm, x, weights.transpose(1, 2), offs=ends), least=0.01, device=device)
    return min(1.0, count * alone / together)


def stream_bandwidth(device: torch.device) -> float:
    """Bytes/s of a copy far larger than any cache, reading and writing."""
    size = STREAM_BYTES[device.type] // 4
    source = torch.ones(size, device=device)
    target = torch.empty_like(source)
    return 8 * size / seconds_of(lambda: target.copy_(source), device=device)


def host_bandwidth(device: torch.device) -> float:
    """Bytes/s from the device to page-locked host memory; on a CPU that of a copy."""
    if device.type == "cpu":
        return stream_bandwidth(device) / 2
    source = torch.ones(1 << 26, device=device)
    target = torch.empty(1 << 26, pin_memory=True)
    return 4 * len(source) / seconds_of(lambda: target.copy_(source, non_blocking=True), device=device)


def operation_seconds(device: torch.device) -> float:
    """Of an elementwise operation on 16 numbers."""
    x = torch.ones(16, device=device)
    return seconds_of(lambda: x.add_(1.0), device=device)


def attention_rates(dtype: str, device: torch.device) -> tuple[float, float]:
    """FLOP/s forward and backward of causal attention as the models run it, counting the half that is not masked."""
    count, length = LENGTHS[device.type]
    packed = PackedSequences.from_lengths((length,) * count, device)
    query, key, value = (
        torch.randn(count * length, HEADS, HEAD_DIM, dtype=DTYPES[dtype], device=device, requires_grad=True)
        for _ in range(3)
    )
    operations = 4.0 * count * length**2 / 2 * HEADS * HEAD_DIM
    attend = attention_functions(DTYPES[dtype]).attend

    def forward() -> torch.Tensor:
        return attend(query, key, value, packed=packed, scale=HEAD_DIM**-0.5)

    alone = seconds_of(forward, device=device)
    grad = torch.ones_like(forward())
    both = seconds_of(lambda: forward().backward(grad), device=device)
    return operations / alone, BACKWARD_ATTENTION * operations / max(both - alone, alone)


def logit_rates(device: torch.device, alone_group: dist.ProcessGroup) -> tuple[float, float]:
    """Logits/s whose log-probs and entropy are computed, forward and backward. alone_group: of this rank alone."""
    rows, columns = LOGITS[device.type]
    logits = torch.randn(rows, columns, device=device, requires_grad=True)
    targets, kernels = torch.zeros(rows, dtype=torch.int64, device=device), vocab_kernels()

    def forward() -> torch.Tensor:
        log_probs, entropy = vocab_parallel_log_probs(
            logits * 1.0, targets, group=alone_group, vocab_size=columns, temperature=1.0, kernels=kernels
        )
        return log_probs.sum() + entropy.sum()

    copied = seconds_of(lambda: logits * 1.0, device=device)
    alone = seconds_of(forward, device=device) - copied
    both = seconds_of(lambda: forward().backward(), device=device) - 2 * copied
    size = rows * columns
    return size / max(alone, copied), size / max(both - alone, copied)


REPEATS = 3  # of which the median counts


def seconds_of(work: Callable[[], object], *, least: float = 0.03, device: torch.device | None = None) -> float:
    """Of one call, after one that does not count: the median of runs that take `least` seconds each."""
    synchronize = torch.cuda.synchronize if device is not None and device.type == "cuda" else _nothing
    work()
    synchronize()
    once = _timed(work, 1, synchronize)
    count = max(1, round(least / max(once, 1e-9)))
    return statistics.median(_timed(work, count, synchronize) for _ in range(REPEATS))


def _timed(work: Callable[[], object], count: int, synchronize: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        work()
    synchronize()
    return (time.perf_counter() - begin) / count


def _nothing() -> None:
    pass
