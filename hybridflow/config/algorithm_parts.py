"""The shared parts of algorithms, with the defaults that single algorithms have for them."""

from typing import Literal

from pydantic import NonNegativeFloat

from hybridflow.config.losses import KL, LossMeanName, PolicyKind, PolicyLoss


class GRPOPolicyLoss(PolicyLoss):
    loss_mean: LossMeanName = "sequence_token_mean"
    """How token losses become one number. constant divides by sampling.max_response_length tokens a sequence."""


class GRPOKL(KL):
    """In the loss: an advantage is of a whole response, and has no place for a penalty a token."""

    use: Literal["loss", "none"] = "loss"
    """Whether the KL to the reference is in the actor's loss."""
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """The estimator of the KL. k3+ has the value of k3 and the gradient of k2."""
    coef: NonNegativeFloat = 0.04
    """The coefficient of the KL. 0: the KL is only measured."""


class OffGroupKL(GRPOKL):
    use: Literal["loss", "none"] = "none"
    """Whether the KL to the reference is in the actor's loss."""


class DrGRPOPolicyLoss(PolicyLoss):
    loss_mean: LossMeanName = "constant"
    """How token losses become one number. constant divides by sampling.max_response_length tokens a sequence."""


class PolicyGradient(PolicyLoss):
    """The gradient of the expected score, term by term: a sum over the tokens of a response, a mean over responses."""

    kind: PolicyKind = "reinforce"
    """The form of the loss: what happens to the probability ratio of a token or a response."""
    loss_mean: LossMeanName = "sequence_sum_mean"
    """How token losses become one number. constant divides by sampling.max_response_length tokens a sequence."""


class DistillPolicyLoss(PolicyLoss):
    kind: PolicyKind = "reinforce"
    """The form of the loss: what happens to the probability ratio of a token or a response."""


class NoKL(KL):
    """There is no penalty beside the advantage, which is a KL itself."""

    use: Literal["none"] = "none"
    """Always none: the advantage is a KL itself."""


class CustomKL(KL):
    use: Literal["reward", "loss", "none"] = "none"
    """Where the KL to the reference enters: the reward of each token, the actor's loss, or nowhere."""
