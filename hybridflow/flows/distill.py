"""On-policy distillation: the student's own responses, judged token by token by a teacher. Agarwal et al. 2023 (GKD).

    r_t = log pi_teacher(y_t) - log pi_student(y_t),    A_t = sum_{k >= 0} gamma^k r_{t+k}

with no gradient through r: the policy gradient of the reverse KL, arXiv 2306.13649 with lambda = 1, estimated at the
token that was drawn. Gu et al. 2023 (MiniLLM), arXiv 2306.08543, sums over what follows; with gamma 0, our default,
each token answers for itself alone. The teacher is the role `reference`, read at the temperature that was sampled at,
and the metric kl/reference_mean, nats a token, is what falls.
"""

from dataclasses import dataclass

from hybridflow.algorithms.advantages import discounted_returns
from hybridflow.batch import PerToken, RolloutBatch
from hybridflow.config.algorithms import Distill
from hybridflow.flows.run import Run


@dataclass(frozen=True)
class DistillBatch(RolloutBatch):
    log_probs: PerToken
    ref_log_probs: PerToken
    advantages: PerToken


def distill(run: Run, c: Distill) -> DistillBatch:
    """One iteration: generate, have the teacher read it, update the actor towards the teacher."""
    rollout = run.generate()
    known = run.whole(log_probs=run.old_log_probs(rollout), ref_log_probs=run.reference.log_probs(rollout))
    advantages = discounted_returns(
        known.ref_log_probs - known.log_probs, rollout.response_mask, lengths=rollout.lengths, gamma=c.gamma
    )
    batch = DistillBatch(**vars(rollout), **vars(known), advantages=advantages)
    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, run.policy_loss(c.policy))
    return batch
