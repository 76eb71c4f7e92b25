"""What an evaluation makes of responses, by hand: two prompts, four responses each, and rewards of an environment."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.flows.evaluate import EvaluatedSet, HeldoutSet, Judge, evaluate, last_turns
from hybridflow.parallel.exchange import PartialTensor
from hybridflow.rewards.answers import answer_reader
from hybridflow.rewards.calls import FunctionCaller, FunctionScores
from hybridflow.rewards.scorer import Scores

NAN = float("nan")
# a row a line: prompt 9 9, and what follows it, of which the policy wrote what is no 0
ROWS = [[1, 2], [1], [3, 0, 4, 5], [1, 2], [0, 7], [8, 0], [6, 0, 6], [2]]
REWARDS = [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]] + [[0.0, 0.0, 1.0]] * 3 + [[NAN] * 3]
WEIGHTS = (0.7, 0.2, 0.1)  # of which float32 has no sum of 1


def prompts() -> PromptBatch:
    return PromptBatch(torch.full((4,), 9), torch.tensor([2, 2]), ("a", "b"), {})


def responses() -> RolloutBatch:
    behind = torch.tensor([i for row in ROWS for i in [9, 9, *row]])
    mask = torch.tensor([bool(i) for row in ROWS for i in [0, 0, *row]])
    rows = len(ROWS)
    return RolloutBatch(
        input_ids=behind,
        lengths=torch.tensor([2 + len(row) for row in ROWS]),
        prompt_lengths=torch.full((rows,), 2),
        prompt_indices=torch.tensor([0] * 4 + [1] * 4),
        truncated=torch.tensor([False, True] + [False] * 5 + [True]),
        response_mask=mask,
        rollout_log_probs=torch.zeros(len(behind)),
        environment_rewards=torch.tensor(REWARDS),
    )


def evaluated(threshold: float = 1.0, name: str = "math") -> EvaluatedSet:
    read, _ = answer_reader(None)
    caller = FunctionCaller(lambda ids: " ".join(map(str, ids)), rank=0, world_size=1)
    unused: Any = None  # an environment's rewards are known to all ranks
    heldout = HeldoutSet(name, prompts(), samples=4, temperature=1.0)
    judge = Judge(None, WEIGHTS, threshold, read)
    return evaluate(heldout, responses(), judge, caller=caller, scorer=None, exchange=unused)


def test_right_is_a_weighted_sum_of_at_least_the_threshold() -> None:
    """All parts of a row are 1 and the sum is right, however float32 adds the weights up. A failed row never is."""
    assert evaluated().right.tolist() == [True, False, False, True] + [False] * 4
    assert evaluated(0.7).right.tolist() == [True, False, True, True] + [False] * 4
    assert evaluated(0.1).right.tolist() == [True] * 7 + [False]
    assert evaluated(1.5).accuracy == 0.0
    assert evaluated(-1.0).right.tolist() == [True] * 7 + [False]


def test_metrics_of_a_set_by_name() -> None:
    """Two of four are right and none of four; of the answers of the first prompt "1 2" comes twice, and is right."""
    assert evaluated().metrics() == {
        "eval/math/accuracy": 2 / 8,
        "eval/math/failed_rows": 1.0,
        "eval/math/response_length_mean": pytest.approx(13 / 8),
        "eval/math/truncated_fraction": 2 / 8,
        "eval/math/pass_at_4": 1 / 2,
        "eval/math/majority_at_4": 1 / 2,
    }
    assert [evaluated().pass_at(k) for k in (1, 2, 3)] == pytest.approx([1 / 4, 5 / 12, 1 / 2])


def test_a_set_without_a_name_has_the_metrics_that_one_has_ever_had() -> None:
    assert evaluated(name="").metrics() == {"eval/accuracy": 2 / 8, "eval/failed_rows": 1.0}


class _Known:
    """In the place of an exchange between ranks: this one knows all rows of every term."""

    group = None

    def gather_all(self, parts: list[PartialTensor]) -> list[torch.Tensor]:
        return [part.values for part in parts]


def _term(values: list[float]) -> PartialTensor:
    return PartialTensor(len(values), torch.arange(len(values)), torch.tensor(values))


def test_the_functions_of_the_run_judge_by_their_weighted_sum_without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's score is in the mean score, and not in what is right; a row that a function failed on is not right."""
    model, first, second = _term([5.0] * 8), [1.0, 1.0, 0.0, 1.0] + [0.0] * 4, [1.0, 0.0, 1.0, 1.0] + [0.0] * 3 + [1.0]
    zeros, failed = _term([0.0] * 8), _term([0.0, 0.0, 0.0, 1.0] + [0.0] * 4)
    functions = (FunctionScores((_term(first),), zeros, zeros), FunctionScores((_term(second),), zeros, failed))
    terms = (model, *functions[0].parts, *functions[1].parts)
    scores = Scores(terms, (2.0, 0.75, 0.25), ("model_0", "one", "two"), functions, judging=(0.75, 0.25))
    monkeypatch.setattr("hybridflow.flows.evaluate.raise_on_all_ranks", lambda *_: None)
    read, _ = answer_reader(None)
    caller, scorer = FunctionCaller(lambda ids: "", rank=0, world_size=1, error_score=0.0), SimpleNamespace()
    scorer.scores = lambda *_: scores
    alone: Any = (replace(responses(), environment_rewards=None), scorer, _Known())
    found = [
        evaluate(
            HeldoutSet("", prompts(), samples=4),
            alone[0],
            Judge(None, (), threshold, read),
            caller=replace(caller, pool=SimpleNamespace(specs=[SimpleNamespace(lost_score=None)] * 2)),
            scorer=alone[1],
            exchange=alone[2],
        )
        for threshold in (1.0, 0.75)
    ]
    assert found[0].right.tolist() == [True] + [False] * 7
    assert found[1].right.tolist() == [True, True] + [False] * 6
    assert found[0].marks.tolist() == pytest.approx([1.0, 0.75, 0.25, 0.0, 0.0, 0.0, 0.0, 0.25])
    assert found[0].metrics() == {
        "eval/accuracy": 1 / 8,
        "eval/score_mean": pytest.approx(10.0 + (4 * 0.75 - 0.75 + 4 * 0.25) / 8),
        "eval/failed_rows": 1.0,
    }


def test_a_set_whose_rows_have_all_failed_is_wrong_and_has_no_mean_score() -> None:
    found = evaluated(name="")
    failed = replace(found.responses, environment_rewards=torch.full((8, 3), NAN))
    found = replace(
        found, responses=failed, scores=torch.zeros(8), right=torch.zeros(8, dtype=torch.bool), num_failed=8
    )
    assert found.metrics() == {"eval/accuracy": 0.0, "eval/failed_rows": 8.0}


def test_an_answer_is_what_the_policy_wrote_last() -> None:
    assert last_turns(responses()) == [[1, 2], [1], [4, 5], [1, 2], [7], [8], [6], [2]]
    nothing = replace(responses(), response_mask=torch.zeros_like(responses().response_mask))
    assert last_turns(nothing) == [[]] * 8


@pytest.mark.parametrize(
    ("function", "response", "answer"),
    [
        ("hybridflow.rewards:numeric_match", "so 3 + 4 is\n#### 1,007.0", Fraction(1007)),
        ("hybridflow.rewards:numeric_match", "none", None),
        ("hybridflow.rewards:math_equal", "thus \\boxed{ x^2 }.", "x^2"),
        ("hybridflow.rewards:math_equal", "it is 1/2", Fraction(1, 2)),
        ("hybridflow.rewards:reasoning_gym", "<answer> yes </answer>", "yes"),
        ("hybridflow.rewards:reasoning_gym", "yes", None),
        ("hybridflow.rewards:exact_match", " 12 ", "12"),
        ("mine:score", " ", None),
        (None, "a\n", "a"),
    ],
)
def test_votes_are_for_what_the_judge_reads(function: str | None, response: str, answer: object) -> None:
    read, described = answer_reader(function)
    assert read(response) == answer
    assert (described == "the text of the response") == (
        function in ("hybridflow.rewards:exact_match", "mine:score", None)
    )
