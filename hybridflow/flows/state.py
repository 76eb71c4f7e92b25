"""The state of a run beside its weights: what a checkpoint has to hold for the next iteration to be the same."""

from dataclasses import dataclass, field

from hybridflow.algorithms.rewards import RunningMoments


@dataclass(frozen=True)
class RunState:
    """What decides the next step beside weights and optimizer state: with all three a run goes on as if not ended."""

    iteration: int = 0  # the last that was begun
    num_prompts_drawn: int = 0
    kl_coef: float = 0.0
    score_moments: RunningMoments = field(default_factory=RunningMoments)
    nonfinite_in_a_row: int = 0  # iterations that lost a step to a number that is not finite
