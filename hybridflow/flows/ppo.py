"""PPO with a critic. Schulman et al. 2017, arXiv 1707.06347; for language models Ziegler et al. 2019, arXiv 1909.08593.

Choices: the score is earned by the last response token (of each branch, where a row has several); the KL is taken off
each token's reward (or is in the loss), at the sampling temperature; advantages are whitened over the batch; values are
clipped near the old ones. The returns that the critic learns may have a lambda of their own, and the advantages one
that grows with the response (VC-PPO, VAPO). Responses with a score above 0 may add an NLL term (VAPO).
"""

from dataclasses import dataclass

from torch import Tensor

from hybridflow.algorithms.advantages import gae, length_adaptive_lambda, tokens_in_mask, whiten
from hybridflow.batch import PerSequence, PerToken, RolloutBatch
from hybridflow.config.algorithms import PPO
from hybridflow.flows.earned import branch_token_rewards
from hybridflow.flows.run import Run
from hybridflow.roles.objectives import value_loss, with_positive_nll


@dataclass(frozen=True)
class PPOBatch(RolloutBatch):
    log_probs: PerToken
    values: PerToken
    raw_scores: PerSequence
    scores: PerSequence
    rewards: PerToken
    advantages: PerToken
    returns: PerToken


@dataclass(frozen=True)
class PPOBatchWithReference(PPOBatch):
    ref_log_probs: PerToken


def ppo(run: Run, c: PPO) -> PPOBatch:
    """One iteration: generate, score, estimate advantages, update critic and actor."""
    rollout = run.generate()
    known = run.whole(
        raw_scores=run.scores(rollout),
        log_probs=run.old_log_probs(rollout),
        **run.ref_log_probs(rollout),
        values=run.critic.values(rollout),
    )
    mask = rollout.response_mask
    scores = run.shaped(known.raw_scores, rollout)
    rewards = branch_token_rewards(scores, run.kl_in_reward(known), rollout, kl_coef=run.kl.coef)
    advantages, returns = estimates(c, rollout, rewards, known.values)
    if c.whiten_advantages:
        advantages = whiten(advantages, mask)
    batch_type = PPOBatchWithReference if run.has_reference else PPOBatch
    batch = batch_type(
        **vars(rollout), **vars(known), scores=scores, rewards=rewards, advantages=advantages, returns=returns
    )
    for mini_batch in run.mini_batches(batch, c.update):
        run.critic.update(mini_batch, value_loss(c.value_clip_range))
        if run.iteration > c.critic_warmup_iterations:
            objective = run.policy_loss(c.policy)
            if c.positive_nll_coef:
                objective = with_positive_nll(objective, mini_batch, mini_batch.raw_scores > 0, c.positive_nll_coef)
            run.actor.update(mini_batch, objective)
    return batch


def estimates(c: PPO, rollout: RolloutBatch, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages for the policy and returns for the critic, (T,) each: one estimate where their lambdas are equal."""
    mask, lengths = rollout.response_mask, rollout.branch_lengths
    of_policy, of_critic = lambdas(c, rollout)
    advantages, returns = gae(rewards, values, mask, lengths=lengths, gamma=c.gamma, gae_lambda=of_policy)
    if isinstance(of_policy, Tensor) or of_policy != of_critic:
        _, returns = gae(rewards, values, mask, lengths=lengths, gamma=c.gamma, gae_lambda=of_critic)
    return advantages, returns


def lambdas(c: PPO, rollout: RolloutBatch) -> tuple[float | Tensor, float]:
    """The lambda of the advantages, one for all or a sequence's own, and that of the returns."""
    of_critic = c.gae_lambda if c.value_gae_lambda is None else c.value_gae_lambda
    if c.length_adaptive_alpha is None:
        return c.gae_lambda, of_critic
    response_lengths = tokens_in_mask(rollout.response_mask, rollout.branch_lengths)
    return length_adaptive_lambda(response_lengths, alpha=c.length_adaptive_alpha), of_critic
