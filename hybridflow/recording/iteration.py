"""The numbers of an iteration: what was sampled, what it cost, and what each rank held."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import tokens_in_mask
from hybridflow.algorithms.groups import equal_groups
from hybridflow.algorithms.kl import kl_k1, kl_k3
from hybridflow.algorithms.value_loss import explained_variance
from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.parallel.exchange import Exchange
from hybridflow.recording.measure import Stopwatch, peak_rss_mb
from hybridflow.reshard.execute import ReshardCost

Metrics = dict[str, float | Tensor]
MIB = 1 << 20


@dataclass(frozen=True)
class Iteration:
    """One finished iteration. portable: the batch for a file of rank 0, where that is not the batch's own tensors."""

    number: int
    prompts: PromptBatch
    batch: RolloutBatch
    metrics: Metrics = field(default_factory=dict)
    score_parts: Mapping[str, Tensor] = field(default_factory=dict)  # (N,) by name; none where they are not known
    portable: Mapping[str, Tensor] | None = None


def batch_metrics(batch: RolloutBatch) -> Metrics:
    """What was generated and how it was judged: of the fields, by their names, that the algorithm's batch has.

    Lengths and means count response tokens; no mean over rows counts those that have failed.
    `reward/equal_groups_fraction` is the share of prompts whose responses have all the same raw score, where a prompt
    has several. `rollout/log_prob_diff_*`, `token_mult_prob_error` (the mean of exp |difference|) and `gen_kl` (k3, of
    the engine's distribution to the trainer's) compare the engine's log-probs with the trainer's. The engine's are of
    the distribution that was sampled from: with top_p, top_k, min_p, penalties or biases the difference of that to the
    trainer's softmax is in them too.
    """
    known: Mapping[str, Tensor] = vars(batch)
    mask, kept, metrics = batch.response_mask, ~batch.failed, Metrics()
    if "raw_scores" in known:
        scores, groups = known["raw_scores"][kept], batch.prompt_indices[kept]
        metrics["reward/score_mean"] = scores.mean()
        metrics["reward/score_std"] = scores.std(correction=0)
        if len(groups.unique()) < len(groups):
            metrics["reward/equal_groups_fraction"] = equal_groups(scores, groups).float().mean()
    if "scores" in known:
        metrics["reward/score_shaped_mean"] = known["scores"][kept].mean()
    response_lengths = tokens_in_mask(mask, batch.lengths)[kept].float()
    metrics["rollout/response_length_mean"] = response_lengths.mean()
    metrics["rollout/response_length_max"] = response_lengths.max()
    metrics["rollout/truncated_fraction"] = batch.truncated[kept].float().mean()
    if "log_probs" in known and known["log_probs"] is not batch.rollout_log_probs:  # which may be the old ones
        metrics |= _mismatch(known["log_probs"], batch.rollout_log_probs, mask)
    if {"log_probs", "ref_log_probs"} <= known.keys():
        kl = kl_k1(known["log_probs"], known["ref_log_probs"]).masked_fill_(~mask, 0.0).sum()
        metrics["kl/reference_mean"] = kl / mask.count_nonzero()
        metrics["kl/sequence_mean"] = kl / kept.sum()
    if {"values", "returns"} <= known.keys():
        metrics["critic/explained_variance"] = explained_variance(known["values"], known["returns"], mask)
    return metrics


def length_metrics(batch: RolloutBatch, buckets: LengthBuckets[int]) -> Metrics:
    """How many prompts of each bucket of lengths the batch has, and of their responses: mean length, share cut, score.

    sampling/up_to_64/..., and sampling/longer/... of prompts beyond the last; of an empty bucket the number alone.
    """
    known: Mapping[str, Tensor] = vars(batch)
    of_rows, metrics = torch.tensor(buckets.for_lengths(batch.prompt_lengths.tolist())), Metrics()
    response_lengths = tokens_in_mask(batch.response_mask, batch.lengths).float()
    for bucket, name in enumerate([*(f"up_to_{end}" for end in buckets.ends), "longer"]):
        rows, area = of_rows == bucket, f"sampling/{name}"
        metrics[f"{area}/prompts"] = float(len(batch.prompt_indices[rows].unique()))
        rows &= ~batch.failed
        if not rows.any():
            continue
        metrics[f"{area}/response_length_mean"] = response_lengths[rows].mean()
        metrics[f"{area}/truncated_fraction"] = batch.truncated[rows].float().mean()
        if "raw_scores" in known:
            metrics[f"{area}/score_mean"] = known["raw_scores"][rows].mean()
    return metrics


def _mismatch(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """Each (T,) tensor of it takes the place of one before."""
    outside, number = ~mask, mask.count_nonzero()
    gen_kl = kl_k3(rollout_log_probs, log_probs).masked_fill_(outside, 0.0).sum() / number
    difference = (rollout_log_probs - log_probs).abs_().masked_fill_(outside, 0.0)
    mean, largest = difference.sum() / number, difference.max()
    return {
        "rollout/log_prob_diff_mean": mean,
        "rollout/log_prob_diff_max": largest,
        "rollout/token_mult_prob_error": difference.exp_().masked_fill_(outside, 0.0).sum() / number,
        "rollout/gen_kl": gen_kl,
    }


def cost_metrics(
    batch: RolloutBatch,
    *,
    watch: Stopwatch,
    reshards: list[ReshardCost],
    exchange: Exchange,
    actor_bytes: Mapping[str, int],
    engine_bytes: int,
    num_steps: Mapping[str, int],
) -> Metrics:
    """Seconds, rates and bytes, each the largest of any rank: a role need not lie on rank 0. num_steps: by role."""
    total = sum(watch.seconds.get(name, 0.0) for name in ("rollout", "estimate", "update"))
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
        "time/scored_while_waiting_seconds": watch.seconds.get("scored_while_waiting", 0.0),  # on some ranks, or none
        **{f"time/{name}_seconds": value for name, value in watch.seconds.items()},
    }
    values = torch.tensor(list(own.values()), dtype=torch.float64, device=exchange.device)
    largest = dict(zip(own, exchange.maximum(values).tolist(), strict=True))
    seconds = {name: largest[f"time/{name}_seconds"] for name in watch.seconds}
    return (
        largest
        | _rates(batch, largest["time/iteration_seconds"], seconds, num_steps)
        | {"time/idle_fraction": exchange.mean(idle)}
    )


def training_costs(
    batch: RolloutBatch,
    *,
    watch: Stopwatch,
    exchange: Exchange,
    trained_bytes: Mapping[str, int],
    num_steps: Mapping[str, int],
) -> Metrics:
    """As `cost_metrics`, of a run on fixed data. num_steps: by name, the steps of the model that the run trains."""
    total = sum(watch.seconds.get(name, 0.0) for name in ("estimate", "update"))
    idle, [trained] = exchange.seconds / total, num_steps
    own = {
        f"memory/{trained}_gpu_mem_mb": sum(trained_bytes.values()) / MIB,
        "memory/peak_rss_mb": peak_rss_mb(),
        "time/iteration_seconds": total,
        **{f"time/{name}_seconds": value for name, value in watch.seconds.items()},
    }
    values = torch.tensor(list(own.values()), dtype=torch.float64, device=exchange.device)
    largest = dict(zip(own, exchange.maximum(values).tolist(), strict=True))
    seconds = {name: largest[f"time/{name}_seconds"] for name in watch.seconds}
    rates = _rates(batch, largest["time/iteration_seconds"], seconds, num_steps)
    return largest | rates | {"time/idle_fraction": exchange.mean(idle)}


def _rates(batch: RolloutBatch, total: float, seconds: Mapping[str, float], num_steps: Mapping[str, int]) -> Metrics:
    """Of the phases that there were."""
    rates: Metrics = {}
    if "generate" in seconds:
        rates["rollout/throughput_tokens_per_sec"] = batch.num_response_tokens / seconds["generate"]
    if "reward" in seconds:
        rates["reward/latency_ms"] = 1e3 * seconds["reward"]
    if "critic_update" in seconds and num_steps["critic"]:
        rates["critic/update_latency_ms"] = 1e3 * seconds["critic_update"] / num_steps["critic"]
    if "update" in seconds:
        rates["train/step_time_ms"] = 1e3 * seconds["update"] / max([*num_steps.values(), 1])
    return rates | {"train/tokens_per_sec": len(batch.input_ids) / total}
