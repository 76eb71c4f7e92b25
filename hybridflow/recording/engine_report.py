"""What engines on ranks of their own measure of a rollout, and what the metrics of the iteration make of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.parallel.exchange import Exchange
from hybridflow.recording.iteration import Metrics

# of which the largest of any engine rank counts ...
LARGEST = (
    "rollout/kv_cache_use_max",
    "rollout/preemptions",
    "time/generate_seconds",
    "time/engines_wait_seconds",
    "time/trainers_wait_seconds",
    "reshard/seconds",
    "reshard/bytes_received",
    "reshard/bytes_permuted",
    "reshard/peak_extra_bytes",
    "memory/engine_own_weight_bytes",
    "memory/peak_rollout_mb",
    "told to end",
)
# ... and of which the sum
SUMMED = ("flops", "ideal seconds", "engine ranks")


@dataclass(frozen=True)
class EngineReport:
    """By name, over all engine ranks. turns: counts as in `rollout.rows.TurnCounts`; none without turns."""

    largest: Mapping[str, float]
    summed: Mapping[str, float]
    turns: Sequence[float]

    @classmethod
    def exchanged(cls, exchange: Exchange, own: Mapping[str, float], turns: Sequence[float]) -> "EngineReport":
        """Of all ranks, in two collectives. own: what this rank has measured."""
        device = exchange.device
        largest = torch.tensor([own.get(name, 0.0) for name in LARGEST], dtype=torch.float64, device=device)
        summed = torch.tensor([*(own.get(name, 0.0) for name in SUMMED), *turns], dtype=torch.float64, device=device)
        return cls.of_tensor(torch.cat([exchange.maximum(largest), exchange.sum(summed)]).cpu())

    @classmethod
    def of_tensor(cls, values: Tensor) -> "EngineReport":
        """What `tensor` gave."""
        largest, summed, turns = values.split([len(LARGEST), len(SUMMED), len(values) - len(LARGEST) - len(SUMMED)])
        named = zip(LARGEST, largest.tolist(), strict=True), zip(SUMMED, summed.tolist(), strict=True)
        return cls(dict(named[0]), dict(named[1]), turns.tolist())

    def tensor(self) -> Tensor:
        """Float64, for a file."""
        return torch.tensor([*self.largest.values(), *self.summed.values(), *self.turns], dtype=torch.float64)

    def joined(self, other: "EngineReport") -> "EngineReport":
        """Of both rollouts together: seconds and counts of work add up."""
        waits = ("time/engines_wait_seconds", "time/trainers_wait_seconds")
        adds = ("time/generate_seconds", *waits, "reshard/seconds", "rollout/preemptions")
        largest = {
            name: value + other.largest[name] if name in adds else max(value, other.largest[name])
            for name, value in self.largest.items()
        }
        summed = {name: value + other.summed[name] for name, value in self.summed.items()}
        summed["engine ranks"] = self.summed["engine ranks"]
        return EngineReport(largest, summed, [a + b for a, b in zip(self.turns, other.turns, strict=True)])


def engine_metrics(report: EngineReport, num_generated: int, of_trainers: Metrics, num_trainers: int) -> Metrics:
    """What takes the place of metrics that the trainers alone cannot know.

    num_generated: tokens of the engines. of_trainers: their metrics of the iteration, per rank over `num_trainers`
    ranks.
    """
    found: Metrics = {
        name: max(value, float(of_trainers.get(name, 0.0))) for name, value in report.largest.items() if "/" in name
    }
    seconds, engines = report.largest["time/generate_seconds"], report.summed["engine ranks"]
    everybody = num_trainers + engines
    found["speed/tokens_per_sec_per_gpu"] = (
        float(of_trainers["speed/tokens_per_sec_per_gpu"]) * num_trainers / everybody
    )
    if seconds:
        found["rollout/throughput_tokens_per_sec"] = num_generated / seconds
        found["speed/generate_tflops"] = report.summed["flops"] / engines / seconds / 1e12
        if report.summed["ideal seconds"]:
            found["speed/generate_mfu"] = report.summed["ideal seconds"] / engines / seconds
    own, total = float(of_trainers.get("speed/iteration_tflops", 0.0)), float(of_trainers["time/iteration_seconds"])
    found["speed/iteration_tflops"] = (own * num_trainers + report.summed["flops"] / total / 1e12) / everybody
    if "speed/iteration_mfu" in of_trainers:
        ideal = float(of_trainers["speed/iteration_mfu"]) * num_trainers + report.summed["ideal seconds"] / total
        found["speed/iteration_mfu"] = ideal / everybody
    return found


def staleness_metrics(batch: RolloutBatch, iteration: int) -> Metrics:
    """How many updates older the actor was that chose the tokens than the one that iteration `iteration` updates.

    By staleness N: the share of response tokens, and how far the engine's log-probs are from the trainer's.
    """
    if batch.versions is None:
        return {}
    stale = (iteration - 1 - batch.versions[:, 0].long())[batch.response_mask]
    found: Metrics = {"rollout/staleness_mean": stale.float().mean(), "rollout/staleness_max": float(stale.max())}
    known, mask = batch.tensors(), batch.response_mask
    difference = (known["log_probs"] - batch.rollout_log_probs).abs()[mask] if "log_probs" in known else None
    for number, count in enumerate(stale.bincount().tolist()):
        found[f"rollout/staleness_{number}_fraction"] = count / len(stale)
        if count and difference is not None:
            found[f"rollout/staleness_{number}_log_prob_diff"] = difference[stale == number].mean()
    return found
