"""Parts of the report about mixtures of experts: kernels around the experts' products, and an update.

The figures of before are those of docs/explanation/gpus.md, of 2026-11-27. They are told, never judged.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.models.expert_dispatch import Arrived
from hybridflow.models.expert_rows import ExpertKernels, KernelsByTorch, rows_of, sums_of
from hybridflow.models.experts import Experts
from hybridflow.models.layer_classes import expert_kernels, layer_classes
from hybridflow.parallel.layout import Place
from tests.gpu.kernel_parts import Line, _seconds
from tests.gpu.speed_config import CPU_ONLY, speed_config
from tests.launch import torchrun
from tests.models.test_experts import config

BEFORE = "0.88 s, MFU 23.6 % of active parameters as trained, 18.4 % as computed"


def expert_rows(device: torch.device, folder: Path) -> list[Line]:
    """Rows by expert, their sums and the activation with shares: against torch in float32, and their rates.

    And a whole layer of a rank that holds a quarter of the experts, with sizes on the device and read back.
    """
    tokens, hidden, size, experts, k = (4096, 2048, 768, 128, 8) if device.type == "cuda" else (64, 64, 32, 16, 4)
    generator, lines = torch.Generator().manual_seed(0), []
    chosen = torch.rand(tokens, experts, generator=generator).topk(k).indices.to(device)
    shares = torch.rand(tokens, k, generator=generator).to(device)
    x = torch.randn(tokens, hidden, generator=generator).to(device, torch.bfloat16)
    mine, theirs = expert_kernels(kept=True), KernelsByTorch(layer_classes().swiglu.function)
    orders = [kernels.order(chosen, experts, chosen.numel()) for kernels in (mine, theirs)]
    same = torch.equal(orders[0].ends, orders[1].ends) and torch.equal(orders[0].copies.long(), orders[1].copies.long())
    lines.append(Line("order", f"{len(orders[0].copies):,} copies of {experts} experts", same))
    of_rows = torch.randn(chosen.numel(), 2 * size, generator=generator).to(device, torch.bfloat16)
    copied = x.repeat_interleave(k, 0)
    work: dict[str, tuple[int, Callable[[ExpertKernels, int], Tensor]]] = {
        "rows": (2 * k * x.nbytes, lambda kernels, i: rows_of(x, orders[i], kernels)),
        "sums": ((k + 1) * x.nbytes, lambda kernels, i: sums_of(copied, orders[i], kernels)),
        "activation": (3 * of_rows.nbytes // 2, lambda kernels, i: kernels.activated(of_rows, shares, orders[i])),
    }
    for name, (num_bytes, compute) in work.items():
        a, b = compute(mine, 0).float(), compute(theirs, 1).float()
        apart = float((a - b).abs().max() / b.abs().max())
        seconds = [_seconds(partial(compute, own, i), device) for i, own in enumerate((mine, theirs))]
        rates = ", ".join(f"{1e3 * each:.3f} ms" for each in seconds)
        rate = f"{num_bytes / seconds[0] / 1e9:,.0f} GB/s"
        lines.append(Line(name, f"{rates} by torch; {rate}; apart {apart:.1e}", apart < 2**-6))
    lines.extend(_quarters(x, shares, chosen, hidden=hidden, size=size, experts=experts))
    return lines


def _quarters(x: Tensor, shares: Tensor, chosen: Tensor, *, hidden: int, size: int, experts: int) -> list[Line]:
    """Gradients with rows for all copies, of which three of four are of nobody, and with as many rows as there are."""
    sizes = dict(num_moe_experts=experts, hidden_size=hidden, moe_ffn_hidden_size=size, params_dtype=torch.bfloat16)
    found, seconds = [], []
    for kept in (False, True):
        part = Experts(config(**sizes), expert_kernels(kept=kept), Place(1, 0, 4, 1)).to(x.device)
        for number, parameter in enumerate(part.parameters()):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / hidden**0.5
            parameter.data.copy_(values)

        def computed(part: Experts = part) -> list[Tensor]:
            leaves = [x.detach().requires_grad_(), shares.detach().requires_grad_()]
            output = part(Arrived(leaves[0], leaves[1], chosen - experts // 4, None))
            return [output.detach(), *torch.autograd.grad(output.float().square().sum(), [*leaves, *part.parameters()])]

        found.append(computed())
        seconds.append(_seconds(computed, x.device))
    same = all(map(torch.equal, *found))
    value = f"{1e3 * seconds[0]:.2f} ms with sizes on the device, {1e3 * seconds[1]:.2f} ms with sizes read back"
    return [Line("a quarter of the experts", value, same and all(bool(each.isfinite().all()) for each in found[0]))]


def update_of_a_mixture(device: torch.device, folder: Path) -> list[Line]:
    """GRPO of a mixture of 2.7 B parameters, of which 0.5 B are active: an update, beside what an H100 has shown."""
    cuda = device.type == "cuda"
    path, out = speed_config(folder, small=not cuda, experts=True), folder / "run.json"
    torchrun(1, "-m", "tests.gpu.speed_worker", "run", path, out, environment=None if cuda else CPU_ONLY)
    metrics = json.loads(out.read_text())["metrics"]
    name, most = ("rollout/log_prob_diff_mean", 0.05) if cuda else ("rollout/log_prob_diff_max", 1e-4)
    mfu = metrics.get("speed/actor_update_mfu")
    update = f"{metrics['time/actor_update_seconds']:.2f} s, {metrics['speed/actor_update_tflops']:.3g} TFLOP/s"
    return [
        Line(name, f"{metrics[name]:.1e}", metrics[name] < most),
        Line("update of the actor", update + (f", MFU {mfu:.1%}" if mfu else "") + f" (an H100 before: {BEFORE})"),
    ]
