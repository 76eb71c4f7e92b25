"""Held-out evaluation: greedy responses, the share that is right, and their mean score. Never trained on."""

from collections.abc import Callable

from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.rewards.calls import FunctionCaller
from hybridflow.rewards.scorer import Scorer


def evaluate(
    responses: RolloutBatch,
    prompts: PromptBatch,
    right: int | Tensor,
    *,
    caller: FunctionCaller,
    scorer: Scorer | None,
    exchange: Exchange,
    show: Callable[[Tensor], None] = lambda marks: None,
) -> dict[str, float]:
    """Right is what the function of that number in the pool gives exactly 1.0, or whose own number, (N,), is that; NaN
    of a row that has failed. The mean score needs a scorer.

    A row that it fails on, where that does not end the run, is not right, and is counted. show: gets the marks, (N,).
    """
    own: list[PartialTensor] = []
    if isinstance(right, int):
        marks = caller.scores(right, responses, prompts)
        own = [*marks.parts, marks.failures]
    scores = scorer.scores(responses, prompts) if scorer is not None else None
    asked = [*own, *(scores.parts() if scores is not None else ())]
    wholes = exchange.gather_all(asked) if asked else []
    if isinstance(right, Tensor):
        values, failures = right.nan_to_num(0.0), right.isnan().float()
    else:
        values, failures, *wholes = wholes
    show(values * (failures == 0))
    found = {"eval/accuracy": _accuracy(values, failures)}
    if scores is not None:
        found["eval/score_mean"] = float(scores.put_together(wholes)[~responses.failed].mean())
    if isinstance(right, Tensor) or caller.failure_score(right, "timeout") is not None:
        found["eval/failed_rows"] = float((failures != 0).sum())
    return found


def _accuracy(marks: Tensor, failures: Tensor) -> float:
    return float(((marks == 1.0) & (failures == 0)).float().mean())
