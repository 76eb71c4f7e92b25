"""GRPO: no critic; a response is judged against the others of its prompt. Shao et al. 2024, arXiv 2402.03300.

Choices: A_i = (r_i - mean) / (std + 1e-6) with the unbiased std of the group, the same for every token of response i;
the mean over sequences of token means; the KL as k3 in the loss. The paper's equations 3 and 4, section 4.1.2.
"""

from dataclasses import dataclass

from hybridflow.algorithms.advantages import to_tokens
from hybridflow.algorithms.groups import group_advantages
from hybridflow.batch import PerSequence, PerToken, RolloutBatch
from hybridflow.config import GRPO
from hybridflow.flows.run import Run
from hybridflow.roles.objectives import policy_loss


@dataclass(frozen=True)
class GRPOBatch(RolloutBatch):
    log_probs: PerToken
    raw_scores: PerSequence
    scores: PerSequence
    advantages: PerToken


@dataclass(frozen=True)
class GRPOBatchWithReference(GRPOBatch):
    ref_log_probs: PerToken


def grpo(run: Run, c: GRPO) -> GRPOBatch:
    """One iteration: generate groups, score, compare within each group, update the actor."""
    rollout = run.generate()
    known = run.whole(
        raw_scores=run.scores(rollout),
        log_probs=run.actor.log_probs(rollout),
        **run.ref_log_probs(rollout),
    )
    scores = run.shaped(known.raw_scores, rollout)
    of_sequences = group_advantages(scores, rollout.prompt_indices)
    advantages = to_tokens(of_sequences, rollout.response_mask, lengths=rollout.lengths)
    batch_type = GRPOBatchWithReference if run.has_reference else GRPOBatch
    batch = batch_type(**vars(rollout), **vars(known), scores=scores, advantages=advantages)
    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, policy_loss(c.policy, run.kl))
    return batch
