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
from hybridflow.rewards.functions import (
    FunctionCall,
    call_for_parts,
    call_reward_function,
    exact_match,
    load_reward_function,
)
from tests.messages import like


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
    assert (f"looked in {modules}" in str(raised.value)) == (path == "graders.absent:f")


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


class Counted:
    """A function with the number of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, prompts: list[str], responses: list[str], columns: dict[str, list]) -> Any:
        self.calls += 1
        return self.function(prompts, responses, columns)


def test_an_exception_names_the_row_that_was_being_read() -> None:
    def parse(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        return [int(answer) for answer in columns["answer"]]

    function = Counted(parse)
    with pytest.raises(RewardError) as raised:
        call(function, answer=["1", "two", "three"])
    assert str(raised.value) == (
        like(
            "reward function my:reward: row 1: raised ValueError: invalid literal for int() with base 10: 'two'; "
            "its prompt is 'prompt 1', the response 'response 1'"
        )
    )
    assert isinstance(raised.value.__cause__, ValueError)
    assert "'two'" in str(raised.value.__cause__)
    assert function.calls == 2


def by_index(p: list, r: list, columns: dict[str, list]) -> list[float]:
    return [1 / columns["answer"][i] for i in range(len(p))]


def zipped(p: list, r: list, columns: dict[str, list]) -> list[float]:
    return [1 / answer for _, _, answer in zip(p, r, columns["answer"], strict=True)]


def checked_first(p: list, r: list, columns: dict[str, list]) -> list[float]:
    assert all(isinstance(answer, int) for answer in columns["answer"])
    return zipped(p, r, columns)


def searched(p: list, r: list, columns: dict[str, list]) -> list[float]:
    if 0 in columns["answer"]:
        raise ZeroDivisionError
    return [1.0 for _ in p]


def popped(p: list, r: list, columns: dict[str, list]) -> list[float]:
    return [1 / columns["answer"].pop(0) for _ in p]


def cleared_prompts(p: list, r: list, columns: dict[str, list]) -> list[float]:
    p.clear()
    return [1 / answer for answer in columns["answer"]]


def generated(p: list, r: list, columns: dict[str, list]) -> Any:
    return (1 / answer for answer in columns["answer"])


@pytest.mark.parametrize("bad_row", range(5))
@pytest.mark.parametrize("read", [zipped, checked_first, searched, popped, cleared_prompts, generated])
def test_the_row_is_known_however_a_loop_goes(read: Callable[..., Any], bad_row: int) -> None:
    """The first, the last and those between; a read of all rows before it does not hide it."""
    message = message_of(read, num_rows=5, answer=[0 if row == bad_row else 1 for row in range(5)])
    assert f"row {bad_row}: raised ZeroDivisionError" in message
    assert f"'prompt {bad_row}', the response 'response {bad_row}'" in message


@pytest.mark.parametrize("bad_row", range(5))
def test_a_row_that_is_read_by_its_number(bad_row: int) -> None:
    """After the last one nobody can tell whether more was to come."""
    message = message_of(by_index, num_rows=5, answer=[0 if row == bad_row else 1 for row in range(5)])
    if bad_row < 4:
        assert f"row {bad_row}: raised ZeroDivisionError" in message
    else:
        assert message.endswith("ZeroDivisionError: division by zero, after it had read all rows, row 4 last")


def test_rows_are_numbered_as_the_caller_numbers_them() -> None:
    with pytest.raises(RewardError, match="row 13: raised ZeroDivisionError"):
        columns = {"answer": [1, 1, 0]}
        call_reward_function(zipped, "my:reward", ["p"] * 3, ["r"] * 3, columns, rows=[3, 8, 13])


def test_rows_that_are_read_by_the_slice_are_named_together() -> None:
    def in_pairs(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        return [x for start in range(0, 6, 2) for x in 1 / np.array(columns["answer"][start : start + 2])]

    with np.errstate(divide="raise"):
        message = message_of(in_pairs, num_rows=6, answer=[1, 1, 1, 0, 1, 1])
    assert message.endswith("raised FloatingPointError: divide by zero encountered in divide, among rows 2 to 3")


@pytest.mark.parametrize("read", [list, np.array, sorted, "".join, lambda x: x[:], lambda x: "" in x])
def test_a_function_that_reads_all_rows_before_it_raises(read: Callable[..., Any]) -> None:
    def all_at_once(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        read(responses)
        raise RuntimeError("no judge answers")

    function = Counted(all_at_once)
    message = message_of(function)
    assert message == like(
        "reward function my:reward: raised RuntimeError: no judge answers, after it had read all rows"
    )
    assert function.calls == 2


def test_a_function_that_raises_before_it_reads() -> None:
    assert message_of(lambda *_: [][0]).endswith(
        "IndexError: list index out of range; which row it was at cannot be told"
    )


def test_a_row_that_was_moved_is_not_mistaken_for_another() -> None:
    def backwards(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        columns["answer"].reverse()
        del columns["answer"][0]
        return [int(columns["answer"][0])]

    message = message_of(backwards, answer=["1", "two", "3"])
    assert "'two'; which row it was at cannot be told" in message


def test_an_exception_that_comes_only_once_says_so() -> None:
    calls: list[int] = []

    def flaky(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        calls.append(len(prompts))
        if len(calls) == 1:
            raise TimeoutError("too slow")
        return [0.0] * len(prompts)

    message = message_of(flaky)
    assert message.endswith("raised TimeoutError: too slow; called once more with the same 3 rows, it raised nothing")
    assert calls == [3, 3]


def test_another_exception_at_the_second_call_names_no_row() -> None:
    def changing(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
        if type(prompts) is list:
            raise TimeoutError("too slow")
        raise TypeError(f"no lists of this kind: {prompts[0]}")

    message = message_of(changing)
    assert message.endswith(
        "raised TimeoutError: too slow; called once more to find the row, it raised TypeError: no lists of this kind: "
        "prompt 0"
    )


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


def test_a_column_that_is_not_there_is_told_with_those_that_are() -> None:
    message = message_of(exact_match, ground_truth=["4"] * 3, data_source=["x"] * 3)
    assert message == like(
        "raised KeyError: 'answer' (the columns are ground_truth, data_source; data.columns, `arguments`"
    )
    assert "the columns are none" in message_of(exact_match)
    inside = message_of(lambda p, r, columns: [{}["answer"] for _ in p], answer=["4"] * 3)
    assert "data.columns" not in inside


def test_keys_beside_the_parts_and_missing_ones_are_named() -> None:
    """In a dictionary that a function gives in the place of a number a part."""

    def scores(prompts, responses, columns):
        return [{"right": 1.0, "format": 0.5, "length": 3}]

    asked = FunctionCall("f", ["p"], ["r"], {}, [4], {}, parts=("right", "style"))
    with pytest.raises(RewardError) as caught:
        call_for_parts(scores, asked)
    assert "keys of `parts`, right, style; style is missing; format, length is not among them; its prompt" in str(
        caught.value
    )


# ------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (" 4 ", "4", "4.0"),
        (4, "4", "40"),
        (4.0, "4", "40"),
        (40.0, "40", "4"),
        (0.1, "0.1", "0"),
        (1e-7, "0.0000001", "0"),
        (1e22, "1" + "0" * 22, "1"),
        (Decimal("1.50"), "1.5", "1"),
        (True, "true", "1"),
        (False, "False", "0"),
        (["4", "four"], "four", "['4', 'four']"),
        ([4.0, None], "4", "None"),
        ({"target": ["4", "four"]}, "4", "target"),
        ({"value": "4", "aliases": ["four"], "type": "n"}, "four", "n"),
        (np.array(["4", "four"]), "4", "[4]"),
    ],
)
def test_a_response_is_one_of_the_answers_that_a_row_has(answer: Any, right: str, wrong: str) -> None:
    assert exact_match(["p"] * 2, [right, wrong], {"answer": [answer] * 2}) == [1.0, 0.0]


@pytest.mark.parametrize("answer", [None, float("nan"), [], [None], {}, {"other": "4"}, [1, 2]])
def test_what_is_no_answer_is_no_zero(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"column 'answer': .* is (no|one) answer"):
        exact_match(["p"], [str(answer)], {"answer": [answer]})
