"""Finding a user's reward function, calling it, and refusing what is no reward (`hybridflow/rewards/functions.py`)."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.errors import RewardError
from hybridflow.rewards.functions import call_reward_function, exact_match, load_reward_function


def returning(results: Any) -> Callable[..., Any]:
    return lambda prompts, responses, columns: results


def call(function: Callable[..., Any], num_rows: int = 3, **columns: list) -> list[float]:
    prompts = [f"prompt {row}" for row in range(num_rows)]
    responses = [f"response {row}" for row in range(num_rows)]
    return call_reward_function(function, "my:reward", prompts, responses, columns)


def message_of(function: Callable[..., Any], **arguments: Any) -> str:
    with pytest.raises(RewardError) as raised:
        call(function, **arguments)
    assert "reward function my:reward" in str(raised.value)
    return str(raised.value)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on Python's path with a package of reward functions, a broken module, and one that exits."""
    package = tmp_path / "graders"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "length.py").write_text(
        "limit = 3\ndef by_length(prompts, responses, columns):\n    return [len(r) for r in responses]\n"
    )
    (package / "broken.py").write_text("import a_package_that_is_not_there\n")
    (package / "typo.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


# ------------------------------------------------------------------------------------------------ loading


def test_a_function_is_found_by_name(modules: Path) -> None:
    function = load_reward_function("graders.length:by_length")
    assert function(["p"], ["four"], {}) == [4]
    assert load_reward_function("hybridflow.rewards:exact_match") is exact_match


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("graders.absent:f", ["cannot import graders.absent", "ModuleNotFoundError"]),
        ("graders.broken:f", ["cannot import graders.broken", "a_package_that_is_not_there"]),
        ("graders.typo:f", ["cannot import graders.typo", "SyntaxError"]),
        ("graders.length:by_lenght", ["graders.length", "length.py", "has no by_lenght"]),
        ("graders.length:limit", ["is a int", "cannot be called"]),
        ("graders.length", ["expected package.module:function"]),
        (":by_length", ["expected package.module:function"]),
    ],
)
def test_a_function_that_cannot_be_found_is_an_error(modules: Path, path: str, expected: list[str]) -> None:
    with pytest.raises(RewardError) as raised:
        load_reward_function(path)
    for part in [f"reward function {path!r}" if "expected" in expected[0] else path, *expected]:
        assert part in str(raised.value)


# ------------------------------------------------------------------------------------------------ calling


@pytest.mark.parametrize(
    "results",
    [
        [1.0, 0.5, -2.0],
        (1, Fraction(1, 2), -2),
        [True, 0.5, np.float32(-2)],
        [np.bool_(True), np.float64(0.5), np.int64(-2)],
        [torch.tensor(1.0), torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(-2)],
        torch.tensor([1.0, 0.5, -2.0]),
        np.array([1.0, 0.5, -2.0], dtype=np.float16),
    ],
    ids=repr,
)
def test_numbers_of_every_kind_become_floats(results: Any) -> None:
    scores = call(returning(results))
    assert scores == [1.0, 0.5, -2.0]
    assert all(type(score) is float for score in scores)


def test_a_generator_is_a_list_of_numbers() -> None:
    assert call(lambda prompts, responses, columns: (len(p) for p in prompts)) == [8.0, 8.0, 8.0]


def test_no_rows_give_no_scores() -> None:
    assert call(returning([]), num_rows=0) == []


def test_the_function_gets_lists_that_it_may_change() -> None:
    answers = ("a", "b", "c")

    def function(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        assert prompts == ["prompt 0", "prompt 1", "prompt 2"]
        assert responses == ["response 0", "response 1", "response 2"]
        assert columns == {"answer": ["a", "b", "c"]}
        for values in (prompts, responses, columns["answer"]):
            values.clear()
        return [0.0, 1.0, 2.0]

    assert call(function, answer=answers) == [0.0, 1.0, 2.0]
    assert answers == ("a", "b", "c")


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([1.0, 2.0], ["2 numbers for 3 rows", "one a row"]),
        ([1.0] * 4, ["4 numbers for 3 rows"]),
        (None, ["returned NoneType", "expected 3 numbers"]),
        (1.0, ["returned float", "expected 3 numbers"]),
        (torch.tensor(1.0), ["returned Tensor", "expected 3 numbers"]),
        ("abc", ["returned str", "expected 3 numbers"]),
        ({1: 0, 2: 0, 3: 0}, ["returned dict", "expected 3 numbers"]),
        ([1.0, "1", 0.0], ["row 1", "scored '1'", "a str", "expected a number"]),
        ([None, 1.0, 0.0], ["row 0", "scored None", "expected a number"]),
        ([1.0, 0.0, 1j], ["row 2", "scored 1j", "expected a number"]),
        ([1.0, 0.0, Decimal(1)], ["row 2", "a Decimal", "expected a number"]),
        ([1.0, [0.0], 0.0], ["row 1", "scored [0.0]", "expected a number"]),
        (torch.zeros(3, 1), ["row 0", "a Tensor", "expected a number"]),
        ([0.0, float("nan"), 1.0], ["row 1", "scored nan", "finite"]),
        ([0.0, 1.0, float("inf")], ["row 2", "scored inf", "finite"]),
        (torch.tensor([float("-inf"), 0.0, 0.0]), ["row 0", "scored -inf", "finite"]),
    ],
    ids=repr,
)
def test_what_is_no_score_is_an_error_that_names_the_row(results: Any, expected: list[str]) -> None:
    message = message_of(returning(results))
    for part in expected:
        assert part in message


def test_an_exception_names_the_first_row_that_raises_alone() -> None:
    def parse(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        numbers = [int(answer) for answer in columns["answer"]]
        columns["answer"].clear()
        return numbers

    with pytest.raises(RewardError) as raised:
        call(parse, answer=["1", "two", "three"])
    message = str(raised.value)
    for part in ["my:reward", "row 1", "ValueError", "'two'", "'prompt 1'", "'response 1'"]:
        assert part in message
    assert isinstance(raised.value.__cause__, ValueError)
    assert "'two'" in str(raised.value.__cause__)


def test_a_change_to_the_columns_before_raising_does_not_hide_the_row() -> None:
    def careless(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        return [1.0 / columns["answer"].pop(0) for _ in prompts]

    message = message_of(careless, answer=[1, 1, 0])
    assert "row 2: raised ZeroDivisionError" in message


def test_an_exception_inside_a_generator_names_its_row() -> None:
    message = message_of(lambda prompts, responses, columns: (1 / int(p[-1]) for p in prompts))
    assert "row 0: raised ZeroDivisionError" in message


def test_an_exception_that_no_row_raises_alone_says_so() -> None:
    def pairwise(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        if len(prompts) > 1:
            raise RuntimeError("too many at once")
        return [0.0]

    message = message_of(pairwise)
    for part in ["RuntimeError: too many at once", "none of the 3 rows", "alone"]:
        assert part in message


def test_a_long_prompt_is_cut_in_the_message() -> None:
    with pytest.raises(RewardError) as raised:
        call_reward_function(lambda *_: 1 / 0, "my:reward", ["x" * 5000], ["y"], {})
    assert "xxx..." in str(raised.value)
    assert len(str(raised.value)) < 500


def test_stopping_the_run_is_not_an_error_of_the_function() -> None:
    def interrupted(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupted)


# ------------------------------------------------------------------------------------------------ exact_match


def test_exact_match_compares_stripped_texts() -> None:
    columns = {"answer": ["4", 4, " four ", "4", "4"]}
    responses = [" 4\n", "4", "four", "4.", ""]
    assert exact_match(["p"] * 5, responses, columns) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_exact_match_without_answers_names_the_column() -> None:
    assert "KeyError: 'answer'" in message_of(exact_match)
