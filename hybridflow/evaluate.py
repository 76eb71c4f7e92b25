"""Held-out evaluation: greedy responses, the share that is right, and their mean score. Never trained on."""

from dataclasses import dataclass

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.rewards import RewardFunction
from hybridflow.roles.scoring import Scorer


@dataclass(frozen=True)
class Evaluation:
    accuracy: float
    score_mean: float

    def metrics(self) -> dict[str, float]:
        return {"eval/accuracy": self.accuracy, "eval/score_mean": self.score_mean}


def evaluate(
    responses: RolloutBatch, prompts: PromptBatch, scorer: Scorer, right: RewardFunction, name: str
) -> Evaluation:
    """Right is what the function `right`, called `name`, gives exactly 1.0."""
    correct = scorer.function_scores(right, name, responses, prompts) == 1.0
    scores = scorer.scores(responses, prompts)
    return Evaluation(float(correct.float().mean()), float(scores.mean()))
