"""The section `algorithm` of a run on fixed data: nothing is generated, the rows of a file are what is learnt from.

Each class describes the algorithm, a row, and the departures from the paper. `hybridflow.config.fixed_data` reads them.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from hybridflow.config.losses import KL, Update
from hybridflow.config.section import Section

Kind = Literal["sft", "pairs", "labelled"]  # of a row: a completion; a chosen and a rejected one; one with a label


class OneStep(Section):
    """One step with all rows of an iteration. No KL is measured beside what the loss has."""

    kl: ClassVar[KL] = KL(use="none", coef=0.0)
    update: ClassVar[Update] = Update()


class SFT(OneStep):
    """Supervised fine-tuning: the mean of -log pi over all trained tokens of the batch."""

    name: Literal["sft"] = "sft"
    """The name of the algorithm."""

    @property
    def kind(self) -> Kind:
        return "sft"

    def needs(self) -> frozenset[str]:
        return frozenset({"actor"})


class RewardModeling(OneStep):
    """A reward model of pairs: -log sigma(r(chosen) - r(rejected) - margin). Bradley and Terry 1952; arXiv 2203.02155.

    The score is read at the last token. The margin is the row's (Llama 2, arXiv 2307.09288). Without one it is 0.
    """

    name: Literal["reward_model"] = "reward_model"
    """The name of the algorithm."""

    @property
    def kind(self) -> Kind:
        return "pairs"

    def needs(self) -> frozenset[str]:
        return frozenset({"reward_model"})


class DPO(OneStep):
    """Direct preference optimisation. Rafailov et al. 2023, arXiv 2305.18290.

    h is the chosen completion's log-ratio to the reference, less the rejected one's. A log-ratio is a sum over tokens.
    With `loss: sigmoid` the loss is -log sigma(beta h). label_smoothing e (cDPO) gives the reverse loss a weight of e.
    With `loss: ipo` the loss is (h - 1 / (2 beta))^2 (arXiv 2310.12036), and beta is the paper's tau. No length divides
    the sums, as in the paper. Some trainers divide by lengths and need another beta.
    """

    name: Literal["dpo"] = "dpo"
    """The name of the algorithm."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """The loss of a pair: sigmoid (DPO) or ipo."""
    beta: PositiveFloat = 0.1
    """The strength of the pull to the reference. For ipo this is the paper's tau."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """The share of pairs that are assumed to be the wrong way round. 0 turns it off."""

    @property
    def kind(self) -> Kind:
        return "pairs"

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reference"})


class KTO(OneStep):
    """Kahneman-Tversky optimisation of completions that are good or bad, not in pairs. arXiv 2402.01306.

    The loss compares log-ratios with a reference point: the mean log-ratio of mismatched pairs, at least 0. Such a pair
    is a prompt with the completion of the next row. The mean is over the global batch, without gradient.
    """

    name: Literal["kto"] = "kto"
    """The name of the algorithm."""
    beta: PositiveFloat = 0.1
    """The strength of the pull to the reference."""
    desirable_weight: PositiveFloat = 1.0
    """The weight of the loss of good completions. 1: neutral."""
    undesirable_weight: PositiveFloat = 1.0
    """The weight of the loss of bad completions. 1: neutral."""

    @property
    def kind(self) -> Kind:
        return "labelled"

    def needs(self) -> frozenset[str]:
        return frozenset({"actor", "reference"})


FixedAlgorithm = SFT | RewardModeling | DPO | KTO
FIXED_ALGORITHMS: Mapping[str, type[Section]] = {
    "sft": SFT,
    "reward_model": RewardModeling,
    "dpo": DPO,
    "kto": KTO,
}
