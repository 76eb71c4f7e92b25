"""The section `algorithm` of a config: a class an algorithm, with the paper's defaults, and the parts that they share.

Each class describes the algorithm and the departures from the paper. `needs` names the roles that the algorithm needs.
`hybridflow.config` reads the section: this module knows sections, not files.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from hybridflow.config.losses import KL, LossMeanName, PolicyKind, PolicyLoss, UnitInterval, Update
from hybridflow.config.section import Section

# ------------------------------------------------------------------------------------------------ the shared parts


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


# ------------------------------------------------------------------------------------------------ with a critic


class PPO(Section):
    """Proximal policy optimisation with a critic. Schulman et al. 2017, arXiv 1707.06347.

    VC-PPO (arXiv 2503.01491) is `value_gae_lambda: 1` and a critic warm-up. VAPO (2504.05118) adds
    `length_adaptive_alpha: 0.05`, `positive_nll_coef: 0.1`, clip-higher and the token mean.
    """

    name: Literal["ppo"] = "ppo"
    """The name of the algorithm."""
    gamma: UnitInterval = 1.0
    """The discount of rewards per token. 1: no discount."""
    gae_lambda: UnitInterval = 0.95
    """The lambda of generalised advantage estimation."""
    value_gae_lambda: UnitInterval | None = None
    """The lambda of the returns that the critic learns. null: gae_lambda."""
    length_adaptive_alpha: PositiveFloat | None = None
    """The lambda of advantages is 1 - 1 / (length_adaptive_alpha x response tokens). null: gae_lambda."""
    whiten_advantages: bool = True
    """Whether advantages are scaled to mean 0 and variance 1 over the tokens of the batch."""
    positive_nll_coef: NonNegativeFloat = 0.0
    """The coefficient of the mean -log p of tokens in responses with a positive score. 0 turns it off."""
    policy: PolicyLoss = PolicyLoss()
    """The actor's loss."""
    value_clip_range: PositiveFloat | None = 0.2
    """Predicted values are clipped to this distance from the old ones. null: no clipping."""
    kl: KL = KL()
    """The KL to the reference."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""
    critic_warmup_iterations: NonNegativeInt = 0
    """Iterations at the start in which only the critic is trained. 0: none."""

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "critic", "reward"}) | self.kl.needs()


# ------------------------------------------------------------------------------------------------ groups of responses


class DynamicSampling(Section):
    """Train on groups whose raw scores are not all the same, and generate until there are enough. arXiv 2503.14476."""

    max_generation_rounds: PositiveInt = 10
    """Generations of an iteration, at most. Groups of equal scores then fill the batch."""
    surplus: Literal["keep", "drop"] = "keep"
    """Groups beyond a full batch: kept for the next iteration, or dropped."""


class GRPO(Section):
    """Group relative policy optimisation, without a critic. Shao et al. 2024, arXiv 2402.03300.

    A = (r - mean of the group) / (std + 1e-6), with the unbiased std. `std: batch` takes the std of all scores of the
    iteration (arXiv 2508.08221). The papers of gspo, cispo and sapo train `grpo` with this `policy.kind`.
    """

    name: Literal["grpo"] = "grpo"
    """The name of the algorithm."""
    std: Literal["group", "batch"] = "group"
    """The standard deviation that divides advantages: of the group, or of all scores of the iteration."""
    policy: GRPOPolicyLoss = GRPOPolicyLoss()
    """The actor's loss."""
    kl: GRPOKL = GRPOKL()
    """The KL to the reference."""
    dynamic_sampling: DynamicSampling | None = None
    """Groups of equal scores are replaced by new ones. null: all groups are trained on."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reward"}) | self.kl.needs()


class DrGRPO(Section):
    """GRPO without two biases: A = r - mean of the group, and a loss over a constant length, with no KL.

    Liu et al. 2025, arXiv 2503.20783. The constant is sampling.max_response_length, for every batch.
    """

    name: Literal["dr_grpo"] = "dr_grpo"
    """The name of the algorithm."""
    policy: DrGRPOPolicyLoss = DrGRPOPolicyLoss()
    """The actor's loss."""
    kl: OffGroupKL = OffGroupKL()
    """The KL to the reference."""
    dynamic_sampling: DynamicSampling | None = None
    """Groups of equal scores are replaced by new ones. null: all groups are trained on."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reward"}) | self.kl.needs()


class RLOO(Section):
    """REINFORCE with the mean of the other responses as the baseline. Ahmadian et al. 2024, arXiv 2402.14740.

    A response's score loses the KL of the whole response, as in the paper. The default is one step an iteration. For
    several steps give `policy.kind: clip`.
    """

    name: Literal["rloo"] = "rloo"
    """The name of the algorithm."""
    policy: PolicyGradient = PolicyGradient()
    """The actor's loss."""
    kl: KL = KL()
    """The KL to the reference."""
    dynamic_sampling: DynamicSampling | None = None
    """Groups of equal scores are replaced by new ones. null: all groups are trained on."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reward"}) | self.kl.needs()


class OPO(Section):
    """REINFORCE with the baseline of least variance: scores weighted by length. Hao et al. 2025, arXiv 2505.23585.

    Exactly on-policy: one step an iteration, no KL, no entropy bonus.
    """

    name: Literal["opo"] = "opo"
    """The name of the algorithm."""
    policy: PolicyGradient = PolicyGradient()
    """The actor's loss."""
    kl: OffGroupKL = OffGroupKL()
    """The KL to the reference."""
    dynamic_sampling: DynamicSampling | None = None
    """Groups of equal scores are replaced by new ones. null: all groups are trained on."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reward"})


class MaxRL(Section):
    """A = (r - mean of the group) / mean, towards the likelihood of a right response. arXiv 2602.02710.

    A negative score is an error. A group with mean 0 gives 0. The loss mean is hybridflow's choice.
    """

    name: Literal["maxrl"] = "maxrl"
    """The name of the algorithm."""
    policy: PolicyGradient = PolicyGradient()
    """The actor's loss."""
    kl: OffGroupKL = OffGroupKL()
    """The KL to the reference."""
    dynamic_sampling: DynamicSampling | None = None
    """Groups of equal scores are replaced by new ones. null: all groups are trained on."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reward"}) | self.kl.needs()


# ------------------------------------------------------------------------------------------------ one response


class ReMax(Section):
    """REINFORCE with the score of a greedy response to the same prompt as the baseline.

    Li et al. 2023, arXiv 2310.10505. One weight sync serves both responses. Both scores are shaped in the same way.
    """

    name: Literal["remax"] = "remax"
    """The name of the algorithm."""
    policy: PolicyGradient = PolicyGradient()
    """The actor's loss."""
    kl: KL = KL()
    """The KL to the reference."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reward"}) | self.kl.needs()


class Reinforce(Section):
    """REINFORCE++: rewards to go, whitened over all tokens of the batch, under PPO's clipped loss. arXiv 2501.03262.

    With `baseline: none`, G_t = sum_k gamma^k r_{t+k}. The k1 KL is in each reward. With `baseline: group`, the mean of
    the group is subtracted from the score. The k2 KL is then in the loss. The variance is the unbiased one.
    """

    name: Literal["reinforce"] = "reinforce"
    """The name of the algorithm."""
    baseline: Literal["none", "group"] = "none"
    """What is subtracted from a score: nothing, or the mean of the group."""
    gamma: UnitInterval = 1.0
    """The discount of rewards per token, with baseline none. 1: no discount."""
    policy: PolicyLoss = PolicyLoss()
    """The actor's loss."""
    kl: KL = KL(coef=0.01)
    """The KL to the reference."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        """What `kl` leaves open is that of the baseline."""
        if not isinstance(given, dict) or not isinstance(given.get("kl", {}), dict):
            return given
        own = {"use": "loss", "estimator": "k2"} if given.get("baseline") == "group" else {}
        return {**given, "kl": {"coef": 0.01, **own, **given.get("kl", {})}}

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reward"}) | self.kl.needs()


# ------------------------------------------------------------------------------------------------ a teacher


class Distill(Section):
    """On-policy distillation: towards the role `reference`, the teacher, on the actor's own responses.

    A_t = sum_k gamma^k (log pi_teacher - log pi_student) of the tokens from t on. Agarwal et al. 2023, arXiv
    2306.13649.
    """

    name: Literal["distill"] = "distill"
    """The name of the algorithm."""
    gamma: UnitInterval = 0.0
    """The discount of later tokens. 0: a token has one log-ratio. 1: all later log-ratios are added."""
    policy: DistillPolicyLoss = DistillPolicyLoss()
    """The actor's loss."""
    kl: NoKL = NoKL()
    """The KL to the reference."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reference"})


# ------------------------------------------------------------------------------------------------ one's own


class Custom(Section):
    """A flow of the user's own: `function(run, c) -> batch`, where c is this section."""

    name: Literal["custom"]
    """The name of the algorithm."""
    flow: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """The Python function of the flow, as package.module:function."""
    roles: tuple[Literal["actor", "critic", "reference", "reward"], ...]
    """The models of the flow. The actor is one of them."""
    options: dict[str, Any] = {}
    """Values for the flow alone, under any names."""
    policy: PolicyLoss = PolicyLoss()
    """The actor's loss."""
    kl: CustomKL = CustomKL()
    """The KL to the reference."""
    update: Update = Update()
    """Epochs and mini-batches of an iteration."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "actor" not in self.roles:
            raise ValueError(f"roles = {list(self.roles)} leaves out actor, which generates")
        if self.kl.use != "none" and "reference" not in self.roles:
            raise ValueError(f"kl.use = {self.kl.use} needs a reference: add reference to roles = {list(self.roles)}")
        return self

    def needs(self) -> frozenset[str]:
        return frozenset(self.roles)


# ------------------------------------------------------------------------------------------------ what goes with what


Algorithm = PPO | GRPO | DrGRPO | RLOO | ReMax | Reinforce | OPO | MaxRL | Distill | Custom
ALGORITHMS: Mapping[str, type[Section]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "remax": ReMax,
    "reinforce": Reinforce,
    "opo": OPO,
    "maxrl": MaxRL,
    "distill": Distill,
    "custom": Custom,
}
