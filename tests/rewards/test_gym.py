"""The scorer of reasoning-gym's tasks: answers in responses, the confined process, and which tasks execute answers."""

import ast
import json
import time
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.reasoning_gym import EXECUTES, UNREPEATABLE
from hybridflow.data.gym_files import row_of
from hybridflow.rewards import gym_program
from hybridflow.rewards.gym import answer_in, reasoning_gym
from tests.gym import needs_package, release

pytestmark = pytest.mark.slow  # waits for processes


@pytest.mark.parametrize(
    ("response", "tagged", "answer"),
    [
        ("so <answer> 42 </answer>", True, "42"),
        ("<answer>1</answer> no, <answer>\n2\n</answer>.", True, "2"),
        ("<answer>a\nb</answer>", True, "a\nb"),
        ("42", True, None),
        ("<answer>42", True, None),
        (" 42\n", False, "42"),
    ],
)
def test_the_answer_in_a_response(response: str, tagged: bool, answer: str | None) -> None:
    assert answer_in(response, tagged=tagged) == answer


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"cpu_seconds": 0}, "each is at least 1"), ({"network": "no"}, "network = 'no' is neither refuse nor allow")],
)
def test_limits_that_cannot_be(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        reasoning_gym([], [], {"task": [], "entry": []}, **arguments)


class Package:
    """In the place of the real one: its only task evaluates the answer."""

    @staticmethod
    def create_dataset(name: str, **more: Any) -> "Package":
        assert (name, more) == ("evaluates", {"seed": 0, "size": 1, "factor": 2})
        return Package()

    @staticmethod
    def score_answer(answer: str, entry: dict[str, Any]) -> float:
        return float(2 * eval(answer) == entry["answer"][0])


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("3", 1.0),
        ("4", 0.0),
        ("1 / 0", 0.0),
        ("__import__('os')._exit(0)", 0.0),
        ("__import__('time').sleep(60)", 0.0),
        ("exec('while True: pass')", 0.0),
    ],
)
def test_each_answer_is_scored_by_a_process_that_ends(answer: str, score: float) -> None:
    asked = {"task": {"name": "evaluates", "config": {"factor": 2}}, "entry": "{'answer': (6, 7)}", "answer": answer}
    begun = time.monotonic()
    assert gym_program.score(Package, asked, 2.0) == score
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("text", "score"), [(b"0.25", 0.25), (b"7", 1.0), (b"-1", 0.0), (b"nan", 0.0), (b"inf", 0.0), (b"", 0.0)]
)
def test_a_score_is_a_number_from_0_to_1(text: bytes, score: float) -> None:
    assert gym_program.number(text) == score


@pytest.mark.skipif(release() is not None, reason="the package is there")
def test_without_the_package_the_confined_process_says_so() -> None:
    columns = {"task": [{"name": "countdown", "config": {}, "execute": True}], "entry": ["{}"]}
    with pytest.raises(RuntimeError, match="has not begun: ModuleNotFoundError: No module named 'reasoning_gym'"):
        reasoning_gym([""], ["<answer>1</answer>"], columns)


# ------------------------------------------------------------------------------------------------ with the package


def rows_of(name: str, count: int, *, execute: bool = False) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    from reasoning_gym.factory import create_dataset

    data = create_dataset(name, size=count, seed=42)
    entries = [data[i] for i in range(count)]
    task = {"name": name, "config": {}, "execute": execute}
    return entries, {"task": [task] * count, "entry": [repr(entry) for entry in entries]}


def scores(answers: list[str], columns: dict[str, list[Any]], **more: Any) -> list[float]:
    return reasoning_gym(["?"] * len(answers), [f"<answer>{answer}</answer>" for answer in answers], columns, **more)


@needs_package
@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "arc_agi", "rearc", "prime_factorization"])
def test_the_scorer_of_a_task(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """arc_agi and rearc compare tuples, prime_factorization raises at what is no number."""
    entries, columns = rows_of(name, 3)
    assert scores([entry["answer"] for entry in entries], columns) == [1.0] * 3
    assert max(scores(["nothing"] * 3, columns)) < 1
    assert reasoning_gym(["?"] * 3, [entry["answer"] for entry in entries], columns) == [0.0] * 3
    raised = "reasoning-gym's scorer of prime_factorization raised ValueError" in capsys.readouterr().err
    assert raised == (name == "prime_factorization")


@needs_package
def test_a_scorer_that_executes_does_so_in_a_confined_process(tmp_path: Path) -> None:
    entries, columns = rows_of("countdown", 5, execute=True)
    expression = entries[0]["metadata"]["expression"]
    hostile = f"__import__('pathlib').Path({str(tmp_path / 'written')!r}).write_bytes(bytes(3 << 20))"
    found = scores([expression, "1 + 1", "9**9**9**9", hostile, "__import__('os').kill(1, 9)"], columns, cpu_seconds=4)
    assert found[:3] == [1.0, pytest.approx(0.05), 0.0] and max(found[3:]) < 0.1
    written = tmp_path / "written"
    assert not written.exists() or written.stat().st_size <= 1 << 20  # the limit of a file
    direct, plain = rows_of("countdown", 1)
    assert scores([direct[0]["metadata"]["expression"]], plain) == [1.0]


@needs_package
def test_which_tasks_execute_the_models_answer(tmp_path: Path) -> None:
    """Each task scores answers that would write a file, in forms that parsers may take: those of EXECUTES do it."""
    from reasoning_gym.factory import DATASETS, create_dataset

    file = tmp_path / "written"
    call = f"__import__('pathlib').Path({str(file)!r}).touch()"
    forms = [call, f"[{call}]", f"[[{call}]]", f"1 + {call}", f"x = {call}", f'{{"a": {call}}}', f"{call}\n{call}"]
    executed = set()
    for name in set(DATASETS) - set(UNREPEATABLE):
        data = create_dataset(name, size=1, seed=42)
        for form in forms:
            try:
                data.score_answer(form, data[0])
            except Exception as error:
                assert not isinstance(error, KeyError), f"{name}: {error}"
        if file.exists():
            executed.add(name)
            file.unlink()
    assert executed == EXECUTES


@needs_package
def test_an_entry_is_a_literal_and_scores_the_same_by_another_instance() -> None:
    from reasoning_gym.factory import DATASETS, create_dataset

    def outcome(data: Any, answer: str, entry: dict[str, Any]) -> float | str:
        try:
            return data.score_answer(answer, entry)
        except Exception as error:  # boxnet's, for what is no plan
            return repr(error)

    for name in set(DATASETS) - set(UNREPEATABLE):
        data, other = create_dataset(name, size=1, seed=42), create_dataset(name, size=1, seed=0)
        entry = data[0]
        again = ast.literal_eval(row_of(entry, {"name": name}, None)["entry"])
        assert again == entry, name
        answer = entry["answer"] if isinstance(entry["answer"], str) else json.dumps(entry["answer"])
        assert outcome(other, answer, again) == outcome(data, answer, entry), name
