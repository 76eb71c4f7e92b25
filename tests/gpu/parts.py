"""The parts of the report: each takes the device, and tells what it measured and whether that is right.

They run on a CPU as far as they can, where tests/test_gpu_parts.py runs them: a report on a GPU should not fail by its
own mistakes. Rates are told, never judged.
"""

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.models.attention import PackedSequences, attention_by_length
from hybridflow.models.layer_classes import attention_functions
from hybridflow.models.shared_prompt import SharedPrompts, attention_with_copies
from hybridflow.reshard.device_memory import reserved_space
from hybridflow.reshard.execute import select_mover
from hybridflow.reshard.kernel import copy_pieces, permute_blocks
from hybridflow.reshard.reserved import Reserved
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.gpu.expert_parts import expert_rows, update_of_a_mixture
from tests.gpu.kernel_parts import KERNEL_PARTS, Line
from tests.gpu.speed_config import CPU_ONLY, speed_config
from tests.launch import torchrun
from tests.reshard.simulated import SimulatedDevice

NUM_ROUNDS = 10
Groups = list[tuple[int, tuple[int, ...]]]  # prompts, and what follows each


def reserved_addresses(device: torch.device, folder: Path) -> list[Line]:
    """Memory mapped and unmapped again: addresses, and the seconds that it takes."""
    cuda = device.type == "cuda"
    space, num_bytes = (reserved_space(device), 1 << 30) if cuda else (SimulatedDevice(), 1 << 20)
    reserved = Reserved(num_bytes, space)
    reserved.map()
    x = reserved.tensor()
    stays, arrives, started = True, True, time.perf_counter()
    for i in range(NUM_ROUNDS):
        reserved.unmap()
        reserved.map()
        stays &= x.data_ptr() == reserved.address
        arrives &= bool((x[-100:].fill_(i) == i).all())
    seconds = (time.perf_counter() - started) / NUM_ROUNDS
    reserved.unmap()
    return [
        Line("the address stays", f"{NUM_ROUNDS} rounds", stays),
        Line("what is written is there", f"{NUM_ROUNDS} rounds", arrives),
        Line("unmapped and mapped", f"{seconds * 1e3:.2f} ms for {num_bytes >> 20} MiB"),
    ]


def reshard_kernels(device: torch.device, folder: Path) -> list[Line]:
    """Permutation of row blocks and copies of pieces: bit for bit, and their rate, each byte read and written once."""
    heads, columns = (48, 4096) if device.type == "cuda" else (12, 64)
    order = tuple((7 * i + 3) % heads for i in range(heads))
    x = torch.randn(heads * 128, columns, device=device, dtype=torch.bfloat16)
    expected = x.view(heads, 128, columns)[list(order)].reshape_as(x)
    mover = select_mover(device)
    permute_blocks([(x, order)], mover)
    right = torch.equal(x, expected)
    rate = _rate(2 * x.nbytes, device, lambda: permute_blocks([(x, order)], mover))
    wide = torch.randn(heads * 128, 2 * columns, device=device, dtype=torch.bfloat16)
    pairs = list(zip(x.split(128), wide[:, columns:].split(128), strict=True))
    copy_pieces(pairs, mover)
    copied = torch.equal(x, wide[:, columns:])
    copying = _rate(2 * x.nbytes, device, lambda: copy_pieces(pairs, mover))
    return [Line("permutation", rate, right), Line("copies", copying, copied)]


def attention_of_packed_sequences(device: torch.device, folder: Path) -> list[Line]:
    """What training uses here, against attention by length in float64: outputs and gradients."""
    lengths, lines = (300, 300, 7, 128, 1, 64), []
    generator = torch.Generator().manual_seed(0)
    for heads, kv_heads, size in ((8, 8, 64), (8, 2, 128), (4, 4, 32)):
        shapes = [(sum(lengths), count, size) for count in (heads, kv_heads, kv_heads)]
        exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
        packed = PackedSequences.from_lengths(lengths, torch.device("cpu"))
        expected = _gradients(attention_by_length, exact, weight, packed)
        for dtype, most in ((torch.bfloat16, 2e-2), (torch.float32, 1e-4)):
            packed = PackedSequences.from_lengths(lengths, device)
            found = _gradients(
                attention_functions(dtype).attend,
                [x.to(device, dtype) for x in exact],
                weight.to(device, dtype),
                packed,
            )
            name = f"{heads}/{kv_heads} heads of {size}, {str(dtype).removeprefix('torch.')}"
            lines.append(_differences(name, found, expected, most))
    return lines


def attention_of_shared_prompts(device: torch.device, folder: Path) -> list[Line]:
    """Prompts that several responses share, against each response with its own copy of its prompt, in float64."""
    alone, groups = (40, 40), [(300, (200, 77, 1)), (5, (64, 64)), (129, (3,))]
    lengths = (*alone, *(prompt for prompt, _ in groups), *(x for _, responses in groups for x in responses))
    generator, lines = torch.Generator().manual_seed(0), []
    for heads, kv_heads, size in ((8, 8, 64), (8, 2, 128)):
        exact = [
            torch.randn(sum(lengths), count, size, generator=generator, dtype=torch.float64)
            for count in (heads, kv_heads, kv_heads)
        ]
        weight = torch.randn(exact[0].shape, generator=generator, dtype=torch.float64)
        packed = _shared(lengths, groups, sum(alone), torch.device("cpu"))
        expected = _gradients(_with_copies, exact, weight, packed)
        for dtype, most in ((torch.bfloat16, 2e-2), (torch.float32, 1e-4)):
            packed = _shared(lengths, groups, sum(alone), device)
            found = _gradients(
                attention_functions(dtype).attend,
                [x.to(device, dtype) for x in exact],
                weight.to(device, dtype),
                packed,
            )
            name = f"{heads}/{kv_heads} heads of {size}, {str(dtype).removeprefix('torch.')}"
            lines.append(_differences(name, found, expected, most))
    return lines


def training_beside_the_cpu(device: torch.device, folder: Path) -> list[Line]:
    """A batch of the device's engine, trained on in float32 on the CPU and on the device: equal losses and gradients.

    No engine runs on the CPU: vLLM is built for one kind of device.
    """
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    on_device = [] if device.type == "cuda" else ["platform=cpu"]
    dumps = {"tensorboard": False, "dump_batches": True}
    config = _config(folder, dtype=dtype, num_iterations=1, metrics=dumps)
    torchrun(1, "-m", "hybridflow.train", config, *on_device)
    config = _config(folder, num_iterations=1)
    for name, platform in (("cpu", ["platform=cpu"]), ("device", on_device)):
        torchrun(1, "-m", "hybridflow.train", config, f"name={name}", *platform, "--replay", folder / "run")
    (before,), (after,) = (_metrics(folder / f"{name}-replay") for name in ("cpu", "device"))
    lines = []
    for name in (
        "actor/loss",
        "actor/grad_norm",
        "actor/entropy",
        "critic/loss",
        "critic/grad_norm",
        "reward/score_mean",
    ):
        a, b = float(before[name]), float(after[name])
        lines.append(Line(name, f"{a:.6g} on the CPU, {b:.6g}", abs(a - b) <= 1e-3 * max(abs(a), abs(b)) + 1e-5))
    return lines


def loop_with_gathered_weights(device: torch.device, folder: Path) -> list[Line]:
    """Whole iterations where each hand-off moves all weights; on a GPU the engine runs graphs over them.

    Had a graph kept what was there before, the engine's log-probs would not be the trainer's.
    """
    cuda = device.type == "cuda"
    config = _config(folder, dtype="bfloat16" if cuda else "float32", lr=1e-2, num_iterations=4)
    torchrun(1, "-m", "tests.gpu.loop_worker", config, folder / "seen.json", environment=None if cuda else CPU_ONLY)
    seen = json.loads((folder / "seen.json").read_text())
    hand_offs = seen["hand_offs"]
    name, most = ("rollout/log_prob_diff_mean", 0.05) if cuda else ("rollout/log_prob_diff_max", 1e-4)
    differences = [float(row[name]) for row in _metrics(folder / "run")]
    return [
        Line("weights that moved", f"{seen['moved']} in {hand_offs} hand-offs", not seen["moved"] and hand_offs == 4),
        Line("bytes of the engine's own", f"{seen['own_bytes']:,}", seen["own_bytes"] > 0),
        Line("graphs", f"{seen['graphs']}", (seen["graphs"] != "NONE" and seen["why_eager"] is None) or not cuda),
        Line(name, ", ".join(f"{x:.1e}" for x in differences), len(differences) == 4 and max(differences) < most),
    ]


def engine_and_update_speed(device: torch.device, folder: Path) -> list[Line]:
    """Steps of the engine beside vLLM's alone, idle time, wake and sleep, an update: beside what an H100 has shown."""
    cuda = device.type == "cuda"
    config = speed_config(folder, small=not cuda)
    torchrun(
        1, "-m", "tests.gpu.speed_worker", "run", config, folder / "run.json", environment=None if cuda else CPU_ONLY
    )
    ours = json.loads((folder / "run.json").read_text())
    torchrun(
        1,
        "-m",
        "tests.gpu.speed_worker",
        "plain",
        config,
        folder / "plain.json",
        environment=None if cuda else CPU_ONLY,
    )
    alone, metrics = json.loads((folder / "plain.json").read_text()), ours["metrics"]
    rate = metrics["rollout/throughput_tokens_per_sec"]
    mfu = metrics.get("speed/actor_update_mfu")
    update = f"{metrics['time/actor_update_seconds']:.2f} s, {metrics['speed/actor_update_tflops']:.3g} TFLOP/s"
    return [
        _beside("engine step", f"{ours['step ms']:.2f} ms of at most {ours['rows a step']} rows", "9.0 ms of 256"),
        _beside("vLLM alone, plain", f"{alone['plain ms']:.2f} ms", "8.4 ms of 256"),
        _beside(
            "vLLM alone, log-probs and seeds as asked",
            f"{alone['as asked ms']:.2f} ms",
            "12.5 to 14.5 ms of 256, by rate",
        ),
        _beside("generation", f"{rate:,.0f} tokens/s", "29,100 tokens/s"),
        _beside("GPU idle in generation", f"{ours['idle']:.0%}" if "idle" in ours else "no GPU", "64 to 74 %"),
        _beside("wake", f"{ours['wake ms']:.1f} ms", "27 to 33 ms"),
        _beside("sleep", f"{ours['sleep ms']:.1f} ms", "17 to 26 ms"),
        _beside("bytes lost in five wakes and sleeps", f"{ours['lost bytes']:+,}", "+0", right=ours["lost bytes"] == 0),
        _beside("update of the actor", update + (f", MFU {mfu:.1%}" if mfu else ""), "2.91 s, MFU 50.7 %"),
    ]


def training_of_adapters(device: torch.device, folder: Path) -> list[Line]:
    """The same GRPO by adapters of rank 32 and by all weights: log-probs of the engine, seconds, memory."""
    cuda, found = device.type == "cuda", {}
    for kind in ("all weights", "adapters"):
        (own := folder / kind.replace(" ", "_")).mkdir()
        config = json.loads(speed_config(own, small=not cuda).read_text())
        config["actor"]["optimizer"]["lr"] = 1e-3 if cuda else 1e-2
        if kind == "adapters":
            config["actor"]["lora"], config["reference"] = {"rank": 32 if cuda else 4}, None
        (own / "config.yaml").write_text(json.dumps(config))
        out, environment = own / "run.json", None if cuda else CPU_ONLY
        torchrun(1, "-m", "tests.gpu.speed_worker", "run", own / "config.yaml", out, environment=environment)
        found[kind] = json.loads(out.read_text())
    full, own_metrics = (found[kind]["metrics"] for kind in ("all weights", "adapters"))
    name, most = ("rollout/log_prob_diff_mean", 0.05) if cuda else ("rollout/log_prob_diff_max", 1e-4)
    lines = [Line(f"{name}, adapters", f"{own_metrics[name]:.1e}", own_metrics[name] < most)]
    for metric in ("time/rollout_seconds", "time/actor_update_seconds", "memory/actor_gpu_mem_mb"):
        if metric in full:
            lines.append(Line(metric, f"{own_metrics[metric]:.3g}, of all weights {full[metric]:.3g}"))
    steps = [found[kind]["step ms"] for kind in ("adapters", "all weights")]
    return [*lines, Line("engine step", f"{steps[0]:.2f} ms, of all weights {steps[1]:.2f} ms")]


def optimizer_state_in_host_memory(device: torch.device, folder: Path) -> list[Line]:
    """`offload_optimizer: always`, Llama-3.2-1B's shape: the bits of whole steps, seconds, and how copies overlap."""
    cuda = device.type == "cuda"
    speed_config(folder, small=not cuda)
    out = folder / "staged.json"
    arguments = ("-m", "tests.gpu.staged_worker", folder / "model", out)
    torchrun(1, *arguments, environment=None if cuda else CPU_ONLY)
    found = json.loads(out.read_text())
    whole, staged, copies = found["whole"], found["staged"], found["copies"]
    right = found["same"] and whole["norms"] == staged["norms"]
    gib, rate = found["state"] / (1 << 30), found["host"] / 1e9
    both = 2 * rate / copies["both"]
    return [
        Line("weights, main weights, moments and norms", "those of whole steps", right),
        Line("a step", f"{whole['seconds']:.3f} s whole, {staged['seconds']:.3f} s in parts, {gib:.2f} GiB of state"),
        Line("copies", f"{rate / copies['in']:.1f} GB/s in, {rate / copies['out']:.1f} out, {both:.1f} both at once"),
        Line("kept beside weights and gradients", f"{found['kept'] >> 20} MiB", found["kept"] < 16 << 20),
        Line("memory of a step", f"{staged['most'] >> 20} MiB", not cuda or staged["most"] < 3 * found["part"]),
    ]


PARTS: tuple[Callable[[torch.device, Path], list[Line]], ...] = (
    reserved_addresses,
    reshard_kernels,
    *KERNEL_PARTS,
    expert_rows,
    attention_of_packed_sequences,
    attention_of_shared_prompts,
    training_beside_the_cpu,
    loop_with_gathered_weights,
    engine_and_update_speed,
    update_of_a_mixture,
    training_of_adapters,
    optimizer_state_in_host_memory,
)


def _rate(num_bytes: int, device: torch.device, work: Callable[[], object]) -> str:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    started = time.perf_counter()
    for _ in range(NUM_ROUNDS):
        work()
    wait()
    return f"{num_bytes * NUM_ROUNDS / (time.perf_counter() - started) / 1e9:,.1f} GB/s"


def _gradients(
    attend: Callable[..., Tensor], qkv: list[Tensor], weight: Tensor, packed: PackedSequences
) -> list[Tensor]:
    """Outputs, and the gradients of their weighted sum."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(*leaves, packed=packed, scale=leaves[0].shape[-1] ** -0.5)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def _shared(lengths: tuple[int, ...], groups: Groups, start: int, device: torch.device) -> PackedSequences:
    return PackedSequences.from_lengths(lengths, device, SharedPrompts.from_lengths(groups, start=start, device=device))


def _with_copies(query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float) -> Tensor:
    assert packed.shared is not None
    return attention_with_copies(query, key, value, own=packed.own, shared=packed.shared, scale=scale)


def _differences(name: str, found: list[Tensor], expected: list[Tensor], most: float) -> Line:
    differences = [_difference(a, b) for a, b in zip(found, expected, strict=True)]
    return Line(name, "out {:.1e}, dq {:.1e}, dk {:.1e}, dv {:.1e}".format(*differences), max(differences) < most)


def _difference(x: Tensor, expected: Tensor) -> float:
    """Of the largest, relative to the largest."""
    return float((x.cpu().double() - expected).abs().max() / expected.abs().max())


def _config(folder: Path, *, dtype: str = "float32", lr: float = 1e-3, **changes: object) -> Path:
    """A tiny experiment on one rank, its run directory FOLDER/run."""
    path = write_config(folder / "config.yaml", make_inputs(folder / "inputs"))
    config = json.loads(path.read_text()) | changes
    config["actor"] |= {"tensor_parallel_size": 1, "optimizer": {"lr": lr}}
    for role in (config["actor"], config["critic"], config["reference"], *config["reward"]["models"]):
        role["dtype"] = dtype
    path.write_text(json.dumps(config))
    return path


def _beside(name: str, found: str, on_h100: str, *, right: bool = True) -> Line:
    """With what one H100 has shown on 2026-11-27: docs/explanation/gpus.md."""
    return Line(name, f"{found} (an H100: {on_h100})", right)


def _metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))
