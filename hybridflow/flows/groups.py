"""Algorithms without a critic that judge a response against the others of the same prompt; they differ by one function.

    grpo      A = (r - mean) / (std + 1e-6)           Shao et al. 2024, arXiv 2402.03300, equations 3 and 4
    dr_grpo   A = r - mean                            Liu et al. 2025, arXiv 2503.20783; the loss mean is `constant`
    rloo      A = r - mean of the others              Ahmadian et al. 2024, arXiv 2402.14740
    opo       A = r - sum_j l_j r_j / sum_j l_j       Hao et al. 2025, arXiv 2505.23585
    maxrl     A = (r - mean) / mean                   arXiv 2602.02710

Choices: A is the same for every token of a response; the std is the unbiased one; a KL is in the loss, but for RLOO,
which takes the KL of the whole response off the response's score, as the paper does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import to_tokens, tokens_in_mask
from hybridflow.algorithms.groups import (
    batch_std_advantages,
    centred_advantages,
    group_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    mean_normalized_advantages,
)
from hybridflow.batch import PerSequence, PerToken, RolloutBatch
from hybridflow.config.algorithms import GRPO, OPO, RLOO, DrGRPO, MaxRL
from hybridflow.errors import RewardError
from hybridflow.flows.dynamic_sampling import sample_groups
from hybridflow.flows.run import Run

Relative = Callable[[Tensor, RolloutBatch], Tensor]  # scores and what they are of -> (N,)


@dataclass(frozen=True)
class GroupBatch(RolloutBatch):
    log_probs: PerToken
    raw_scores: PerSequence
    scores: PerSequence
    advantages: PerToken


@dataclass(frozen=True)
class GroupBatchWithReference(GroupBatch):
    ref_log_probs: PerToken


def train_on_groups(run: Run, c: GRPO | DrGRPO | RLOO | OPO | MaxRL, relative: Relative) -> GroupBatch:
    """One iteration: generate groups, score, compare within each group, update the actor."""
    rollout, raw_scores = sample_groups(run, c.dynamic_sampling)
    known = run.whole(
        raw_scores=raw_scores,
        log_probs=run.old_log_probs(rollout),
        **run.ref_log_probs(rollout),
    )
    scores = run.shaped(known.raw_scores, rollout)
    penalties = run.kl.coef * run.kl_of_responses(known, rollout)
    of_sequences = of_kept_rows(relative, scores - penalties, rollout)
    advantages = to_tokens(of_sequences, rollout.response_mask, lengths=rollout.lengths)
    batch_type = GroupBatchWithReference if run.has_reference else GroupBatch
    batch = batch_type(**vars(rollout), **vars(known), scores=scores, advantages=advantages)
    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, run.policy_loss(c.policy))
    return batch


def of_kept_rows(relative: Relative, scores: Tensor, rollout: RolloutBatch) -> Tensor:
    """(N,) with zero for rows that have failed: the others are compared as if there were none.

    A row that then has nobody left to be compared with has zero too.
    """
    if not rollout.failed.any():
        return relative(scores, rollout)
    kept = ~rollout.failed
    groups = torch.bincount(rollout.prompt_indices[kept], minlength=int(rollout.prompt_indices.max()) + 1)
    rows = (kept & (groups[rollout.prompt_indices] > 1)).nonzero().flatten()
    found = torch.zeros_like(scores)
    if len(rows):
        found[rows] = relative(scores[rows], rollout.select(rows))
    return found


def grpo(run: Run, c: GRPO) -> GroupBatch:
    of_group = group_advantages if c.std == "group" else batch_std_advantages
    return train_on_groups(run, c, lambda scores, rollout: of_group(scores, rollout.prompt_indices))


def dr_grpo(run: Run, c: DrGRPO) -> GroupBatch:
    return train_on_groups(run, c, lambda scores, rollout: centred_advantages(scores, rollout.prompt_indices))


def rloo(run: Run, c: RLOO) -> GroupBatch:
    return train_on_groups(run, c, lambda scores, rollout: leave_one_out_advantages(scores, rollout.prompt_indices))


def opo(run: Run, c: OPO) -> GroupBatch:
    def relative(scores: Tensor, rollout: RolloutBatch) -> Tensor:
        response_lengths = tokens_in_mask(rollout.response_mask, rollout.lengths)
        return length_weighted_advantages(scores, rollout.prompt_indices, response_lengths)

    return train_on_groups(run, c, relative)


def maxrl(run: Run, c: MaxRL) -> GroupBatch:
    def relative(scores: Tensor, rollout: RolloutBatch) -> Tensor:
        if (scores < 0).any():
            row = int(scores.argmin())
            raise RewardError(
                f"the score of row {row} is {float(scores[row])}: maxrl divides by the mean score of a group, none may "
                f"be negative. Give rewards of at least 0, or choose another algorithm"
            )
        return mean_normalized_advantages(scores, rollout.prompt_indices)

    return train_on_groups(run, c, relative)
