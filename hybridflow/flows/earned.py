"""What each token of a rollout earns."""

from torch import Tensor

from hybridflow.algorithms.rewards import token_rewards
from hybridflow.batch import RolloutBatch


def branch_token_rewards(scores: Tensor, kl: Tensor, rollout: RolloutBatch, *, kl_coef: float) -> Tensor:
    """(T,): see `token_rewards`. scores: (N,). kl: (T,).

    Each branch of a row earns the row's score at the branch's end: text of one branch is no state of another.
    """
    of_branches = scores[rollout.rows_of_branches]
    return token_rewards(of_branches, kl, rollout.response_mask, lengths=rollout.branch_lengths, kl_coef=kl_coef)
