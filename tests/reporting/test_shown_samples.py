"""Which samples a page shows, in which order, and what stands beside them."""

import json
import math

import pytest

from hybridflow.reporting.runs import Sample, Samples
from hybridflow.reporting.shown_samples import answer_columns, chosen, shown_samples, taken_answer


def sample(score: object, **more: object) -> Sample:
    return {"iteration": 1, "prompt": "p", "response": "r", "score": score, **more}


def test_the_best_come_first_and_of_many_the_worst_stay() -> None:
    scores = [0.5, None, 2, math.nan, -1.0]
    assert [row["score"] for row in chosen([sample(score) for score in scores])][:3] == [2, 0.5, -1.0]
    many = chosen([sample(float(score)) for score in range(40)])
    assert [row["score"] for row in many] == [*range(39, 31, -1), *range(7, -1, -1)]


def test_of_many_prompts_whole_groups_are_shown() -> None:
    """Of ten prompts with 5 rows the best two and the worst one, whole: a fourth has no room."""
    rows = [sample(float(10 * prompt + i), prompt=f"p{prompt}") for i in range(5) for prompt in range(10)]
    shown = [row["prompt"] for row in chosen(rows)]
    assert shown == ["p9"] * 5 + ["p8"] * 5 + ["p0"] * 5
    one = [sample(float(i), prompt="large") for i in range(40)] + [sample(99.0, prompt="small")]
    assert [row["score"] for row in chosen(one)] == [99, *range(39, 31, -1), *range(6, -1, -1)]


def test_held_out_and_training_are_kept_apart() -> None:
    rows = [sample(float(i), kind="train") for i in range(40)] + [sample(1.0, kind="heldout")] * 3
    [iteration] = shown_samples(Samples({7: rows}, 1), {})["iterations"]
    assert (iteration["iteration"], iteration["count"], len(iteration["rows"])) == (7, 43, 19)
    assert [row["heldout"] for row in iteration["rows"]] == [True] * 3 + [False] * 16
    assert (iteration["rows"][3]["number"], iteration["rows"][3]["score"]) == (39.0, "39")


@pytest.mark.parametrize(
    ("columns", "config", "answer", "more"),
    [
        ({"answer": "42", "level": 3}, {}, "42", {"level": "3"}),
        ({"level": 3, "ground_truth": ["a", "b"]}, {}, '["a", "b"]', {"level": "3"}),
        ({"reward_model": {"style": "rule", "ground_truth": "7"}}, {}, "7", {"reward_model": '{"style": "rule"}'}),
        ({"answer": "42", "key": "43"}, {"metrics.eval_reward.arguments.answer": '"key"'}, "43", {"answer": "42"}),
        ({"level": 3}, {}, None, {"level": "3"}),
    ],
)
def test_the_reference_answer_of_a_row(
    columns: dict[str, object], config: dict[str, str], answer: str | None, more: dict[str, str]
) -> None:
    rows = [sample(1.0, columns=columns, parts={"rule": 0.5})]
    [shown] = shown_samples(Samples({1: rows}, 1), config)["iterations"][0]["rows"]
    assert (shown["answer"] and shown["answer"]["text"]) == answer
    assert {name: value["text"] for name, value in shown["more"].items()} == {**more, "parts": '{"rule": 0.5}'}


def test_the_column_of_the_answer_as_the_config_names_it() -> None:
    keys = ("reward.functions.0.arguments.answer", "metrics.eval_reward.arguments.answer", "reward.functions.0.weight")
    assert answer_columns({key: json.dumps(key[:6]) for key in keys}) == ["reward", "metric"]
    assert taken_answer({"answer": None}, ["answer"]) is None
