"""REINFORCE++: what each token's rewards to go are worth in the batch, without critic. arXiv 2501.03262.

    baseline none:    A = whiten(G_t),    G_t = sum_k gamma^k r_{t+k} with the KL taken off each token's reward
    baseline group:   A = whiten(r - mean of the group),    with the KL in the loss

Choices: the score is earned by the last response token; `whiten` is over all response tokens of the iteration, on all
replicas, with the unbiased variance.
"""

from dataclasses import dataclass

from torch import Tensor

from hybridflow.algorithms.advantages import discounted_returns, to_tokens, whiten
from hybridflow.algorithms.groups import centred_advantages
from hybridflow.batch import PerSequence, PerToken, RolloutBatch
from hybridflow.config.algorithms import Reinforce
from hybridflow.flows.earned import branch_token_rewards
from hybridflow.flows.known import Known
from hybridflow.flows.run import Run


@dataclass(frozen=True)
class ReinforceBatch(RolloutBatch):
    log_probs: PerToken
    raw_scores: PerSequence
    scores: PerSequence
    advantages: PerToken


@dataclass(frozen=True)
class ReinforceBatchWithReference(ReinforceBatch):
    ref_log_probs: PerToken


def reinforce(run: Run, c: Reinforce) -> ReinforceBatch:
    """One iteration: generate, score, whiten what each token earns, update the actor."""
    rollout = run.generate()
    known = run.whole(
        raw_scores=run.scores(rollout),
        log_probs=run.old_log_probs(rollout),
        **run.ref_log_probs(rollout),
    )
    scores = run.shaped(known.raw_scores, rollout)
    earned = (
        _against_group(scores, rollout) if c.baseline == "group" else _to_go(run, c, known, scores, rollout=rollout)
    )
    advantages = whiten(earned, rollout.response_mask)
    batch_type = ReinforceBatchWithReference if run.has_reference else ReinforceBatch
    batch = batch_type(**vars(rollout), **vars(known), scores=scores, advantages=advantages)
    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, run.policy_loss(c.policy))
    return batch


def _to_go(run: Run, c: Reinforce, known: Known, scores: Tensor, *, rollout: RolloutBatch) -> Tensor:
    """G_t, (T,)."""
    rewards = branch_token_rewards(scores, run.kl_in_reward(known), rollout, kl_coef=run.kl.coef)
    return discounted_returns(rewards, rollout.response_mask, lengths=rollout.branch_lengths, gamma=c.gamma)


def _against_group(scores: Tensor, rollout: RolloutBatch) -> Tensor:
    """The score less the mean of the prompt's, at each response token, (T,)."""
    centred = centred_advantages(scores, rollout.prompt_indices)
    return to_tokens(centred, rollout.response_mask, lengths=rollout.lengths)
