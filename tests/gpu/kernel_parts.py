"""Parts of the report about kernels of training and of the reshard's calls, each with what an H100 showed before.

The figures of before are those of docs/explanation/gpus.md, of 2026-11-27. They are told, never judged.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.models.attention import PackedSequences
from hybridflow.models.attention_backends import FUSED, by_kernel, why_not_flash3, why_not_fused
from hybridflow.models.layer_classes import attention_functions, layer_classes
from hybridflow.models.layers import SwiGLUFunction
from hybridflow.parallel.vocab import VocabKernels, by_torch, vocab_kernels
from hybridflow.reshard.execute import select_mover
from hybridflow.reshard.kernel import prepared_copies, prepared_permutation

NUM_ROUNDS = 20


class Line(NamedTuple):
    name: str
    value: str
    right: bool = True


def log_probs(device: torch.device, folder: Path) -> list[Line]:
    """Log-probs, entropies and their gradient: against float64, and beside torch's operators."""
    rows, columns = (2048, 128_256) if device.type == "cuda" else (16, 5000)
    lines = []
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        logits = (2 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))).to(device, dtype)
        targets = torch.arange(rows, device=device) * 17 % columns
        expected, found = (_exact(logits[:16], targets[:16]), _of_kernels(vocab_kernels(), logits[:16], targets[:16]))
        differences = [_relative(a, b) for a, b in zip(found[:2], expected[:2], strict=True)]
        gradient = _relative(found[2], expected[2])
        right = max(differences) < most and gradient < (1e-5 if dtype == torch.float32 else 2**-8)
        name = str(dtype).removeprefix("torch.")
        value = "log-probs {:.1e}, entropies {:.1e}, gradient {:.1e}".format(*differences, gradient)
        lines.append(Line(name, value, right))
        for what, kernels in (("chosen here", vocab_kernels()), ("by torch", by_torch(device.type))):
            forward, backward = _times(kernels, logits, targets, device)
            rates = f"{1e3 * forward:.2f} ms forward, {1e3 * backward:.2f} ms backward"
            moved = logits.nbytes / 1e9
            lines.append(
                Line(f"{name} {what}", f"{rates}: {moved / forward:,.0f} and {2 * moved / backward:,.0f} GB/s")
            )
        again = _of_kernels(vocab_kernels(), logits[:16], targets[:16])
        lines.append(Line(f"{name} again", "the same bits", all(map(torch.equal, again, found))))
    return [*lines, Line("before", "float32 operations over the vocabulary were 0.43 s of an update's 2.86 s busy")]


def swiglu(device: torch.device, folder: Path) -> list[Line]:
    """Where Transformer Engine does not compute it, one kernel each way: against float64, and beside torch."""
    rows, size = (8192, 8192) if device.type == "cuda" else (64, 96)
    chosen, lines = layer_classes().swiglu.function, []
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x, grad = (torch.randn(rows, n, device=device, dtype=dtype) for n in (2 * size, size))
        exact = x[:64].double().requires_grad_()
        gate, up = exact.chunk(2, dim=-1)
        right = gate * torch.sigmoid(gate) * up
        [right_grad] = torch.autograd.grad(right, [exact], grad[:64].double())
        mine = x[:64].clone().requires_grad_()
        out = chosen.apply(mine)
        [mine_grad] = torch.autograd.grad(out, [mine], grad[:64])
        differences = [_relative(out.detach(), right.detach()), _relative(mine_grad, right_grad)]
        name = str(dtype).removeprefix("torch.")
        value = "output {:.1e}, gradient {:.1e}".format(*differences)
        lines.append(Line(name, value, max(differences) < most))
        for what, function in (("chosen here", chosen), ("by torch", SwiGLUFunction)):
            leaf = x.clone().requires_grad_()

            def both(function: type[torch.autograd.Function] = function, leaf: Tensor = leaf, g: Tensor = grad) -> None:
                torch.autograd.grad(function.apply(leaf), [leaf], g)

            lines.append(Line(f"{name} {what}", f"{1e3 * _seconds(both, device):.3f} ms forward and backward"))
    return [*lines, Line("before", "SwiGLU was 0.07 s of an update's 2.86 s busy, with Transformer Engine")]


def reshard_calls(device: torch.device, folder: Path) -> list[Line]:
    """What a call takes beside its kernel: tables are made once, and all pieces and weights are one launch."""
    mover, lines = select_mover(device), []
    for number, before in ((48, "0.604 ms, of which the kernel 0.038"), (480, "3.93 ms, of which the kernel 0.347")):
        wide = torch.randn(number * 128, 512, device=device).bfloat16()
        x = torch.zeros(number * 128, 256, device=device, dtype=torch.bfloat16)
        pairs = list(zip(x.split(128), wide[:, 256:].split(128), strict=True))
        run = prepared_copies(pairs, mover)
        run()
        called, waited = _host_seconds(run, device), _seconds(run, device)
        value = f"{1e3 * waited:.3f} ms, {1e6 * called:.1f} us of Python a call; an H100 before: {before}"
        lines.append(Line(f"{number} pieces", value, torch.equal(x, wide[:, 256:])))
    order = tuple((7 * i + 3) % 48 for i in range(48))
    rows, columns = (48 * 64, 2048) if device.type == "cuda" else (48, 64)
    weights = [torch.randn(rows, columns, device=device).bfloat16() for _ in range(16)]
    expected = [x.view(48, -1)[list(order)].view_as(x) for x in weights]
    permute = prepared_permutation([(x, order) for x in weights], mover)
    permute()
    right = all(map(torch.equal, weights, expected))
    called, waited = _host_seconds(permute, device), _seconds(permute, device)
    rate = 2 * sum(x.nbytes for x in weights) / waited / 1e9
    value = f"{1e3 * waited:.3f} ms, {rate:,.0f} GB/s, {1e6 * called:.1f} us of Python a call; an H100 before: "
    return [
        *lines,
        Line("16 weights permuted", value + "2,476 to 2,637 GB/s in the kernel, 0.11 to 0.14 ms a weight", right),
    ]


def attention_backends(device: torch.device, folder: Path) -> list[Line]:
    """Which kernels of attention are there and right, and how long each takes."""
    lines = [
        Line("flash attention 3", _verdict(why_not_flash3())),
        Line("cuDNN's attention through Transformer Engine", _verdict(why_not_fused())),
    ]
    count, length = (16, 2048) if device.type == "cuda" else (2, 32)
    dtype = torch.bfloat16
    packed = PackedSequences.from_lengths((length,) * count, device)
    drawn = [torch.randn(count * length, heads, 64, device=device).to(dtype) for heads in (32, 8, 8)]
    ways = {"chosen here": attention_functions(dtype).attend}
    ways |= {"by cuDNN": by_kernel(FUSED)} if why_not_fused() is None else {}
    for name, attend in ways.items():
        leaves = [x.requires_grad_() for x in drawn]

        def both(attend: Callable[..., Tensor] = attend, leaves: list[Tensor] = leaves) -> None:
            torch.autograd.grad(attend(*leaves, packed=packed, scale=0.125).sum(), leaves)

        lines.append(Line(name, f"{1e3 * _seconds(both, device):.2f} ms forward and backward of {count} x {length}"))
    return lines


KERNEL_PARTS = (log_probs, swiglu, reshard_calls, attention_backends)


def _verdict(reason: str | None) -> str:
    return "there and right" if reason is None else f"not taken: {reason}"


def _exact(logits: Tensor, targets: Tensor) -> list[Tensor]:
    leaf = logits.double().requires_grad_()
    log_p = torch.log_softmax(leaf, dim=1)
    log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    (log_probs.sum() + 0.5 * entropy.sum()).backward()
    assert leaf.grad is not None
    return [log_probs.detach(), entropy.detach(), leaf.grad]


def _of_kernels(kernels: VocabKernels, logits: Tensor, targets: Tensor) -> list[Tensor]:
    """As `parallel.vocab` puts them together on one rank."""
    ones = torch.ones(len(logits), device=logits.device)
    peak, (exp_sum, weighted, target) = kernels.partial_sums(logits, logits.shape[1], targets, ones)
    log_norm = exp_sum.log()
    entropy, gradient = log_norm - weighted / exp_sum, logits.clone()
    rows = {"normalizer": peak + log_norm, "entropy": entropy, "grad_log_probs": ones, "grad_entropy": 0.5 * ones}
    kernels.gradients(gradient, logits.shape[1], targets, ones, **rows)
    return [target - log_norm, entropy, gradient]


def _times(kernels: VocabKernels, logits: Tensor, targets: Tensor, device: torch.device) -> tuple[float, float]:
    columns, ones = logits.shape[1], torch.ones(len(logits), device=device)
    rows = {name: ones for name in ("normalizer", "entropy", "grad_log_probs", "grad_entropy")}
    written = logits.clone()
    forward = _seconds(lambda: kernels.partial_sums(logits, columns, targets, ones), device)
    return forward, _seconds(lambda: kernels.gradients(written, columns, targets, ones, **rows), device)


def _relative(x: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((x.double() - expected).abs().max() / expected.abs().max())


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one, with what it leaves for the device to do."""
    work()
    _wait(device)
    started = time.perf_counter()
    for _ in range(NUM_ROUNDS):
        work()
    _wait(device)
    return (time.perf_counter() - started) / NUM_ROUNDS


def _host_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Until a call returns, the device having nothing else to do; the least of some."""
    seconds = []
    for _ in range(NUM_ROUNDS):
        _wait(device)
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
