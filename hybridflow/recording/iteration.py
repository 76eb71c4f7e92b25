"""The numbers of an iteration: what was sampled, what it cost, and what each rank held."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import masked_mean
from hybridflow.algorithms.kl import kl_k1
from hybridflow.algorithms.value_loss import explained_variance
from hybridflow.batch import PromptBatch, TrainBatch
from hybridflow.parallel.exchange import Exchange
from hybridflow.recording.measure import Stopwatch, peak_rss_mb
from hybridflow.reshard.execute import ReshardCost

Metrics = dict[str, float | Tensor]
MIB = 1 << 20


@dataclass(frozen=True)
class Iteration:
    """One finished iteration. `scores` are the raw ones, before penalty, normalisation and clipping."""

    number: int
    prompts: PromptBatch
    batch: TrainBatch
    scores: Tensor  # (N,)
    metrics: Metrics = field(default_factory=dict)


def rollout_metrics(batch: TrainBatch, scores: Tensor) -> Metrics:
    """What was generated and how it was judged."""
    mask = batch.response_mask
    response_lengths = (batch.lengths - batch.prompt_lengths).float()
    difference = (batch.rollout_log_probs - batch.log_probs).abs()
    kl = kl_k1(batch.log_probs, batch.ref_log_probs) * mask
    return {
        "reward/score_mean": scores.mean(),
        "reward/score_std": scores.std(correction=0),
        "reward/score_shaped_mean": batch.scores.mean(),
        "rollout/response_length_mean": response_lengths.mean(),
        "rollout/truncated_fraction": batch.truncated.float().mean(),
        "rollout/log_prob_diff_mean": masked_mean(difference, mask),
        "rollout/log_prob_diff_max": (difference * mask).max(),
        "kl/reference_mean": masked_mean(kl, mask),
        "kl/sequence_mean": kl.sum() / len(batch),
        "critic/explained_variance": explained_variance(batch.values, batch.returns, mask),
    }


def cost_metrics(
    batch: TrainBatch,
    *,
    watch: Stopwatch,
    reshards: list[ReshardCost],
    exchange: Exchange,
    actor_bytes: dict[str, int],
    engine_bytes: int,
    num_steps: int,
) -> Metrics:
    """Seconds, rates and bytes, each the largest of any rank: a role need not lie on rank 0."""
    total = sum(watch.seconds[name] for name in ("rollout", "estimate", "update"))
    idle = exchange.seconds / total
    own = {
        "reshard/seconds": sum(cost.seconds for cost in reshards),
        "reshard/bytes_received": sum(cost.bytes_received for cost in reshards),
        "reshard/bytes_sent": sum(cost.bytes_sent for cost in reshards),
        "reshard/bytes_permuted": sum(cost.bytes_permuted for cost in reshards),
        "reshard/peak_extra_bytes": max((cost.peak_extra_bytes for cost in reshards), default=0),
        "memory/actor_gpu_mem_mb": sum(actor_bytes.values()) / MIB,
        "memory/actor_weight_bytes": actor_bytes["weights"],
        "memory/engine_own_weight_bytes": engine_bytes,
        "memory/peak_rss_mb": peak_rss_mb(),
        "time/iteration_seconds": total,
        **{f"time/{name}_seconds": value for name, value in watch.seconds.items()},
    }
    values = torch.tensor(list(own.values()), dtype=torch.float64, device=exchange.device)
    largest = dict(zip(own, exchange.maximum(values).tolist(), strict=True))
    seconds = {name: largest[f"time/{name}_seconds"] for name in watch.seconds}
    return largest | {
        "rollout/throughput_tokens_per_sec": float(batch.response_mask.sum()) / seconds["generate"],
        "reward/latency_ms": 1e3 * seconds["reward"],
        "critic/update_latency_ms": 1e3 * seconds["critic_update"] / num_steps,
        "train/step_time_ms": 1e3 * seconds["update"] / num_steps,
        "train/tokens_per_sec": len(batch.input_ids) / largest["time/iteration_seconds"],
        "time/idle_fraction": exchange.mean(idle),
    }
