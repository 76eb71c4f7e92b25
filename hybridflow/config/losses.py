"""What the sections of most algorithms have: the KL penalty, the policy loss with importance weights, updates."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from hybridflow.config.section import Section
from hybridflow.errors import Mendable

UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]


class KL(Section):
    """Where the KL to the reference enters: subtracted from the reward of each token, or added to the actor's loss."""

    use: Literal["reward", "loss", "none"] = "reward"
    """Where the KL to the reference enters: the reward of each token, the actor's loss, or nowhere."""
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k1"
    """The estimator of the KL. k3+ has the value of k3 and the gradient of k2."""
    coef: NonNegativeFloat = 0.05
    """The coefficient of the KL. 0: the KL is only measured."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """fixed keeps coef. adaptive changes coef towards target."""
    target: PositiveFloat = 6.0
    """For adaptive: the KL to reach, in nats per sequence."""
    horizon: PositiveFloat = 10000.0
    """For adaptive: sequences over which the coefficient changes."""
    reset_reference_interval: PositiveInt | None = None
    """Iterations after which the reference becomes a copy of the actor. null: never."""

    @property
    def resets(self) -> bool:
        """Whether the reference becomes the actor now and then."""
        return self.reset_reference_interval is not None

    def needs(self) -> frozenset[str]:
        return frozenset() if self.use == "none" else frozenset({"reference"})


BAND_KINDS = ("geometric", "icepop")


class Importance(Section):
    """Weights of tokens whose probabilities differ between the engine and the trainer before the trainer's updates.

    w_t = exp(log pi_t - log mu_t), mu the engine's. What is left out stays in the divisor of the loss mean.
    """

    kind: Literal["token", "sequence", "geometric", "icepop"] = "token"
    """token and sequence cap the weights of tokens or responses. geometric and icepop leave out what lies outside a
    band."""
    cap: PositiveFloat | None = None
    """For token and sequence: the largest weight. null: 2."""
    low: PositiveFloat | None = None
    """For geometric and icepop: the lower end of the band. null: 0.5 for icepop; geometric needs a number."""
    high: PositiveFloat | None = None
    """For geometric and icepop: the upper end of the band. null: 5 for icepop; geometric needs a number."""

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("kind", "token")
        defaults = {"low": 0.5, "high": 5.0} if kind == "icepop" else {"cap": 2.0} if kind not in BAND_KINDS else {}
        return {**given, **{key: value for key, value in defaults.items() if given.get(key) is None}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low is not None and self.high is not None and not self.low <= 1 <= self.high:
            raise Mendable(
                f"low = {self.low}, high = {self.high}: low must be at most 1 and high at least 1, where engine and "
                "trainer agree",
                {"low" if self.low > 1 else "high": [1]},
            )
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Of the weights, those that lie within are as they were."""
        return self.low or 0.0, self.cap or self.high or 0.0


def with_importance(policy: Mapping[str, Any]) -> dict[str, Any]:
    """A section `policy` as it is written now: the `importance_cap` of old is the cap of `importance`."""
    tree = {key: value for key, value in policy.items() if key != "importance_cap"}
    if policy.get("importance_cap") is not None:
        if tree.get("importance") is not None:
            raise ValueError("importance_cap is now importance.cap, which is given too: leave one out")
        tree["importance"] = {"kind": "token", "cap": policy["importance_cap"]}
    return tree


LossMeanName = Literal["token_mean", "sequence_token_mean", "sequence_sum_mean", "constant", "prompt_mean"]
PolicyKind = Literal["clip", "dual_clip", "gspo", "cispo", "sapo", "reinforce"]
CLIP_RANGES: Mapping[str, tuple[float, float]] = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


class PolicyLoss(Section):
    """The actor's loss of each response token, and the mean over the mini-batch.

    kind: `clip` (PPO), `dual_clip`, `gspo` (the ratio is a response's), `cispo` (the clipped ratio is a weight), `sapo`
    (a soft gate in place of the clip), `reinforce` (no ratio). CISPO's paper has no number for the bound: by default a
    weight is 5 at most, and has no lower one.
    """

    kind: PolicyKind = "clip"
    """The form of the loss: what happens to the probability ratio of a token or a response."""
    clip_range: PositiveFloat = 0.2
    """Ratios are clipped at 1 - clip_range. Default 3e-4 for gspo, and 1 for cispo, which is no lower bound."""
    clip_range_high: PositiveFloat | None = None
    """Ratios are clipped at 1 + clip_range_high. null: clip_range; 4e-4 for gspo, 4 for cispo."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """For dual_clip: with a negative advantage A the loss is at most -dual_clip x A. null: 3."""
    tau_positive: PositiveFloat | None = None
    """For sapo: the temperature of the gate where the advantage is positive. null: 1."""
    tau_negative: PositiveFloat | None = None
    """For sapo: the temperature of the gate where the advantage is not positive. null: 1.05."""
    loss_mean: LossMeanName = "token_mean"
    """How token losses become one number. constant divides by sampling.max_response_length tokens a sequence."""
    mask_truncated: bool = False
    """Whether responses that reached the limit of length are left out of the loss and of the mean."""
    entropy_coef: NonNegativeFloat = 0.0
    """The coefficient of the entropy bonus. 0 turns it off."""
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    """Whose log-probs are the old ones. engine saves a forward pass."""
    replay_routing: bool = False
    """Whether the actor takes the experts that the engine chose for each token. Only for mixtures of experts."""
    importance: Importance | None = None
    """Weights for the difference between the engine's and the trainer's probabilities. null: no weights."""

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        """An `importance_cap` goes where it is now; gspo and cispo have clip ranges of their own."""
        if not isinstance(given, dict):
            return given
        low_high = CLIP_RANGES.get(str(given.get("kind", cls.model_fields["kind"].default)))
        ranges = dict(zip(("clip_range", "clip_range_high"), low_high, strict=True)) if low_high else {}
        return ranges | with_importance(given)


class Update(Section):
    """Passes over the batch of an iteration, cut into mini-batches in random order: an optimizer step each."""

    epochs: PositiveInt = 1
    """Passes over the batch of an iteration."""
    mini_batch_size: PositiveInt | None = None
    """Sequences of one optimizer step, over all ranks. null: the whole batch."""
    whole_prompts: bool = False
    """Whether a mini-batch has all responses to each prompt. A shared prompt is then computed once. Not
    where prompts have unlike numbers of responses, by sampling.by_prompt_length."""
