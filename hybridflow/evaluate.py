"""Held-out evaluation: greedy responses, the share that is right, and their mean score. Never trained on."""

from dataclasses import dataclass

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.parallel.exchange import Exchange
from hybridflow.rewards import RewardFunction
from hybridflow.roles.scoring import Scorer


@dataclass(frozen=True)
class Evaluation:
    accuracy: float
    score_mean: float

    def metrics(self) -> dict[str, float]:
        return {"eval/accuracy": self.accuracy, "eval/score_mean": self.score_mean}


def evaluate(
    responses: RolloutBatch,
    prompts: PromptBatch,
    scorer: Scorer,
    right: RewardFunction,
    name: str,
    *,
    exchange: Exchange,
) -> Evaluation:
    """Right is what the function `right`, called `name`, gives exactly 1.0."""
    parts = [scorer.function_part(right, name, responses, prompts), *scorer.parts(responses, prompts)]
    marks, *scores = exchange.wholes(parts)
    return Evaluation(float((marks == 1.0).float().mean()), float(scorer.total(scores).mean()))
