"""The numbers of an iteration that say what it cost: seconds, rates, operations, bytes, and who waited for whom."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.parallel.exchange import Exchange
from hybridflow.recording.iteration import Metrics
from hybridflow.recording.measure import Stopwatch
from hybridflow.reshard.execute import ReshardCost

MIB = 1 << 20
MOST_RANKS = 16  # that have a column each
HOST_STATE = "memory/host_state_mb"  # where any rank has some
OVERLAPPED = "scored_while_waiting"  # a phase of some ranks, or of none


def cost_metrics(
    batch: RolloutBatch,
    *,
    watch: Stopwatch,
    reshards: Sequence[ReshardCost],
    exchange: Exchange,
    actor_bytes: Mapping[str, int],
    host_bytes: int,
    engine_bytes: int,
    num_steps: Mapping[str, int],
    cache_use: Mapping[str, float],
    num_generated: int,
) -> Metrics:
    """Seconds, rates and bytes, each the largest of any rank: a role need not lie on rank 0. num_steps: by role.

    cache_use: metrics of the engine's KV cache on this rank; the names are alike on all ranks.
    num_generated: tokens of responses that the iteration has generated; the batch may have others.
    """
    own = {
        "reshard/seconds": sum(cost.seconds for cost in reshards),
        "reshard/bytes_received": sum(cost.bytes_received for cost in reshards),
        "reshard/bytes_sent": sum(cost.bytes_sent for cost in reshards),
        "reshard/bytes_permuted": sum(cost.bytes_permuted for cost in reshards),
        "reshard/peak_extra_bytes": max((cost.peak_extra_bytes for cost in reshards), default=0),
        "memory/actor_gpu_mem_mb": sum(actor_bytes.values()) / MIB,
        "memory/actor_weight_bytes": actor_bytes["weights"],
        HOST_STATE: host_bytes / MIB,
        "memory/engine_own_weight_bytes": engine_bytes,
    }
    more = {f"time/{OVERLAPPED}_seconds": watch.seconds.get(OVERLAPPED, 0.0), **cache_use}
    stages = ("rollout", "estimate", "update")
    found = _costs(batch, own, stages, watch=watch, exchange=exchange, num_steps=num_steps, more=more)
    if found.get("time/generate_seconds"):
        found["rollout/throughput_tokens_per_sec"] = num_generated / found["time/generate_seconds"]
    return found


def training_costs(
    batch: RolloutBatch,
    *,
    watch: Stopwatch,
    exchange: Exchange,
    trained_bytes: Mapping[str, int],
    host_bytes: int,
    num_steps: Mapping[str, int],
) -> Metrics:
    """As `cost_metrics`, of a run on fixed data. num_steps: by name, the steps of the model that the run trains."""
    [trained] = num_steps
    own = {f"memory/{trained}_gpu_mem_mb": sum(trained_bytes.values()) / MIB, HOST_STATE: host_bytes / MIB}
    return _costs(batch, own, ("estimate", "update"), watch=watch, exchange=exchange, num_steps=num_steps)


def _costs(
    batch: RolloutBatch,
    own: Mapping[str, float],
    stages: Sequence[str],
    *,
    watch: Stopwatch,
    exchange: Exchange,
    num_steps: Mapping[str, int],
    more: Mapping[str, float] | None = None,
) -> Metrics:
    """One collective."""
    total = sum(watch.seconds.get(stage, 0.0) for stage in stages)
    phases = [name for name in watch.seconds if name != OVERLAPPED]  # alike on all ranks
    largest, of_ranks = _exchanged(
        {
            **own,
            "memory/peak_rss_mb": watch.most_resident_mb(),
            "time/iteration_seconds": total,
            **(more or {}),
            **{f"time/{name}_seconds": value for name, value in watch.seconds.items()},
            **{f"memory/peak_{stage}_mb": value for stage, value in watch.peaks_mb.items()},
        },
        [
            exchange.seconds / total,
            total,
            *(watch.waited.get(stage, 0.0) for stage in stages),
            *(watch.flops.get(name, 0.0) for name in phases),
            *(watch.ideal_seconds.get(name, 0.0) for name in phases),
        ],
        exchange,
    )
    if not largest[HOST_STATE]:
        del largest[HOST_STATE]
    idle, totals, waited, *work = of_ranks.split([1, 1, len(stages), len(phases), len(phases)], dim=1)
    seconds = {name: largest[f"time/{name}_seconds"] for name in watch.seconds}
    slowest = largest["time/iteration_seconds"]
    flops, ideal = (dict(zip(phases, each.T, strict=True)) for each in work)
    return {
        **largest,
        **_rates(batch, slowest, seconds, num_steps),
        "time/idle_fraction": float(idle.mean()),
        "speed/tokens_per_sec_per_gpu": len(batch.input_ids) / slowest / len(of_ranks),
        **speed_metrics(flops, ideal, seconds, slowest),
        **wait_metrics(waited, totals.flatten()),
    }


def _exchanged(
    own: Mapping[str, float], of_rank: Sequence[float], exchange: Exchange
) -> tuple[dict[str, float], Tensor]:
    """By name the largest of any rank; and (ranks, values) of each rank, which are not negative."""
    table = torch.zeros(exchange.group.size(), len(of_rank), dtype=torch.float64)
    table[exchange.group.rank()] = torch.tensor(of_rank, dtype=torch.float64)
    values = torch.cat([torch.tensor(list(own.values()), dtype=torch.float64), table.flatten()])
    largest, flat = exchange.maximum(values.to(exchange.device)).cpu().split([len(own), table.numel()])
    return dict(zip(own, largest.tolist(), strict=True)), flat.view_as(table)


def _rates(batch: RolloutBatch, total: float, seconds: Mapping[str, float], num_steps: Mapping[str, int]) -> Metrics:
    """Of the phases that there were."""
    rates: Metrics = {}
    if "reward" in seconds:
        rates["reward/latency_ms"] = 1e3 * seconds["reward"]
    if "critic_update" in seconds and num_steps["critic"]:
        rates["critic/update_latency_ms"] = 1e3 * seconds["critic_update"] / num_steps["critic"]
    if "update" in seconds:
        rates["train/step_time_ms"] = 1e3 * seconds["update"] / max([*num_steps.values(), 1])
    return rates | {"train/tokens_per_sec": len(batch.input_ids) / total}


def speed_metrics(
    flops: Mapping[str, Tensor], ideal: Mapping[str, Tensor], seconds: Mapping[str, float], total: float
) -> Metrics:
    """TFLOP/s and MFU of the ranks that worked in a phase, their mean; of the iteration the mean of all ranks.

    flops, ideal: by phase (ranks,) operations, and the seconds that they take at the peak of a device, 0 where the peak
    is not known. seconds: of the phases. total: of the iteration.
    """
    metrics: Metrics = {}
    for name, of_ranks in flops.items():
        works = of_ranks > 0
        if works.any():
            metrics[f"speed/{name}_tflops"] = float(of_ranks[works].mean()) / seconds[name] / 1e12
            if (ideal[name][works] > 0).all():
                metrics[f"speed/{name}_mfu"] = float(ideal[name][works].mean()) / seconds[name]
    if metrics:
        metrics["speed/iteration_tflops"] = sum(float(each.mean()) for each in flops.values()) / total / 1e12
        if len(metrics) == 1 + 2 * sum(name.endswith("_mfu") for name in metrics):
            metrics["speed/iteration_mfu"] = sum(float(each.mean()) for each in ideal.values()) / total
    return metrics


def wait_metrics(waited: Tensor, totals: Tensor) -> Metrics:
    """How much of the iteration ranks waited for others, and for which rank most.

    waited: (ranks, stages) seconds. totals: (ranks,) of the iteration. In a stage the rank that waits least is the one
    that is waited for, for as long as the mean of the others waits longer.
    """
    if len(waited) == 1:
        return {}
    shares = waited.sum(1) / totals
    least, late = waited.min(0)  # (stages,) each
    beyond = (waited - least).sum(0) / (len(waited) - 1)
    of_ranks = torch.zeros(len(waited), dtype=beyond.dtype).index_add(0, late, beyond)
    slowest = int(of_ranks.argmax())
    columns = shares.tolist() if len(shares) <= MOST_RANKS else []
    return {
        "time/wait_fraction_mean": float(shares.mean()),
        "time/wait_fraction_max": float(shares.max()),
        **{f"time/wait_fraction_rank_{rank}": share for rank, share in enumerate(columns)},
        "time/slowest_rank": float(slowest),
        "time/slowest_rank_seconds": float(of_ranks[slowest]),
    }
