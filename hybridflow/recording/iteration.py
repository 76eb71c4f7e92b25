"""The numbers of an iteration: what was sampled, and how it was judged.

For rows of many turns: from the batch, and from the counts of the ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import tokens_in_mask
from hybridflow.algorithms.groups import equal_groups
from hybridflow.algorithms.kl import kl_k1, kl_k3
from hybridflow.algorithms.value_loss import explained_variance
from hybridflow.batch import PromptBatch, RolloutBatch, offsets, response_mask
from hybridflow.config.length_buckets import LengthBuckets

Metrics = dict[str, float | Tensor]
PERCENTILES = (10, 50, 90, 99)  # of response lengths


@dataclass(frozen=True)
class Iteration:
    """One finished iteration. portable: the batch for a file of rank 0, where that is not the batch's own tensors.

    experts_load: of a mixture of experts, by number of the layer the most tokens of an expert over the mean.
    """

    number: int
    prompts: PromptBatch
    batch: RolloutBatch
    metrics: Metrics = field(default_factory=dict)
    score_parts: Mapping[str, Tensor] = field(default_factory=dict)  # (N,) by name; none where they are not known
    portable: Mapping[str, Tensor] | None = None
    experts_load: Mapping[int, float] = field(default_factory=dict)


def batch_metrics(batch: RolloutBatch) -> Metrics:
    """What was generated and how it was judged: of the fields, by their names, that the algorithm's batch has.

    Lengths and means count response tokens; no mean over rows counts those that have failed.
    `rollout/response_length_pN` is the least length that N % of the rows do not exceed.
    `reward/equal_groups_fraction` is the share of prompts whose responses have all the same raw score, where a prompt
    has several. `rollout/log_prob_diff_*`, `token_mult_prob_error` (the mean of exp |difference|) and `gen_kl` (k3, of
    the engine's distribution to the trainer's) compare the engine's log-probs with the trainer's. The engine's are of
    the distribution that was sampled from: with top_p, top_k, min_p, penalties or biases the difference of that to the
    trainer's softmax is in them too.
    """
    known = batch.tensors()
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
    for share in PERCENTILES if len(response_lengths) else ():
        rank = -(-share * len(response_lengths) // 100)  # the nearest rank: a length that there is
        metrics[f"rollout/response_length_p{share}"] = response_lengths.kthvalue(rank).values
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
    known = batch.tensors()
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


def turns_of_rows(batch: RolloutBatch) -> Tensor:
    """(N,) int64: runs of tokens that the policy chose."""
    mask = batch.response_mask
    begins = mask & ~torch.cat([torch.zeros(1, dtype=torch.bool), mask[:-1]])
    begins[offsets(batch.lengths)] = mask[offsets(batch.lengths)]
    return tokens_in_mask(begins, batch.lengths)


def turn_metrics(batch: RolloutBatch) -> Metrics:
    """Of the rows that are trained on; means are of those that have not failed."""
    kept, read = ~batch.failed, batch.by_branch()
    behind = tokens_in_mask(response_mask(read.lengths, read.prompt_lengths), batch.lengths)
    written = behind - tokens_in_mask(batch.response_mask, batch.lengths)
    metrics: Metrics = {"environment/failed_rows": float(batch.failed.sum())}
    if kept.any():
        metrics["environment/turns_mean"] = turns_of_rows(batch)[kept].float().mean()
        metrics["environment/written_tokens_mean"] = written[kept].float().mean()
        if batch.branch_starts is not None:
            rows = batch.rows_of_branches.bincount(minlength=len(batch))
            metrics["environment/sequences_mean"] = rows[kept].float().mean()
            metrics["environment/sequences_max"] = float(rows.max())
    return metrics


def count_metrics(counts: Mapping[str, float]) -> Metrics:
    """Of all rows that were generated, over all ranks. counts: those of `rollout.rows.TurnCounts`, by name."""
    turns, prefix = max(counts["turns"], 1.0), counts["prefix_tokens"]
    found: Metrics = {
        "environment/tool_calls": counts["tool_calls"],
        "environment/failed_tool_calls": counts["failed_calls"],
        "environment/dropped_turns": counts["dropped"],
        "environment/wait_seconds_mean": counts["seconds"] / turns,
    }
    return found | ({"environment/cached_prefix_fraction": counts["cached_tokens"] / prefix} if prefix else {})
