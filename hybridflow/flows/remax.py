"""ReMax: the score of a greedy response is the baseline. Li et al. 2023, arXiv 2310.10505.

    A_t = sum_{s >= t} r_s - b,    b the score of the greedy response to the same prompt

Choices: both kinds of responses take one hand-off of the weights; the baseline is shaped with the scores, as one batch;
the KL is taken off each token's reward (or is in the loss), and not off the baseline.
"""

from dataclasses import dataclass

from hybridflow.algorithms.advantages import discounted_returns, to_tokens
from hybridflow.algorithms.rewards import token_rewards
from hybridflow.batch import PerSequence, PerToken, RolloutBatch, joined
from hybridflow.config.algorithms import ReMax
from hybridflow.flows.run import Greedy, Run, Sampled


@dataclass(frozen=True)
class ReMaxBatch(RolloutBatch):
    log_probs: PerToken
    raw_scores: PerSequence
    scores: PerSequence
    baselines: PerSequence
    rewards: PerToken
    advantages: PerToken


@dataclass(frozen=True)
class ReMaxBatchWithReference(ReMaxBatch):
    ref_log_probs: PerToken


def remax(run: Run, c: ReMax) -> ReMaxBatch:
    """One iteration: generate both kinds, score, take the greedy score off what each token earns, update the actor."""
    rollout, greedy = run.generate(Sampled(), Greedy())
    both, sizes = joined(rollout, greedy), [len(rollout), len(greedy)]
    known = run.whole(
        raw_scores=run.scores(both),
        log_probs=run.old_log_probs(rollout),
        **run.ref_log_probs(rollout),
    )
    mask, lengths = rollout.response_mask, rollout.lengths
    raw_scores, raw_greedy_scores = known.raw_scores.split(sizes)
    scores, greedy_scores = run.shaped(known.raw_scores, both).split(sizes)
    baselines = greedy_scores[rollout.prompt_indices]  # a greedy response a prompt, in their order
    rewards = token_rewards(scores, run.kl_in_reward(known), mask, lengths=lengths, kl_coef=run.kl.coef)
    returns = discounted_returns(rewards, mask, lengths=lengths, gamma=1.0)
    advantages = returns - to_tokens(baselines, mask, lengths=lengths)
    run.metrics["reward/greedy_score_mean"] = raw_greedy_scores.mean()
    batch_type = ReMaxBatchWithReference if run.has_reference else ReMaxBatch
    batch = batch_type(
        **vars(rollout),
        **vars(known) | {"raw_scores": raw_scores},
        scores=scores,
        baselines=baselines,
        rewards=rewards,
        advantages=advantages,
    )
    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, run.policy_loss(c.policy))
    return batch
