"""The numbers of an iteration whose rows have many turns: from the batch, and from the counts of the ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import tokens_in_mask
from hybridflow.batch import RolloutBatch, offsets, response_mask
from hybridflow.recording.iteration import Metrics


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
    """Of all rows that were generated, over all ranks. counts: those of `rollout.turn_counts.TurnCounts`, by name."""
    turns, prefix = max(counts["turns"], 1.0), counts["prefix_tokens"]
    found: Metrics = {
        "environment/tool_calls": counts["tool_calls"],
        "environment/failed_tool_calls": counts["failed_calls"],
        "environment/dropped_turns": counts["dropped"],
        "environment/wait_seconds_mean": counts["seconds"] / turns,
    }
    return found | ({"environment/cached_prefix_fraction": counts["cached_tokens"] / prefix} if prefix else {})
