"""Functions that were written for other trainers: known by their parameters, with lines that adapt them and run."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards.foreign import adapter
from hybridflow.rewards.functions import check_arguments

COLUMNS = {name: ["4", "5"] for name in ("answer", "answers", "ground_truth", "solution")} | {
    "data_source": ["gsm"] * 2
}


def openrlhf(queries, prompts, labels):
    return [float(q == f"{p}4" and label == "4") for q, p, label in zip(queries, prompts, labels, strict=True)]


def openrlhf_later(queries, prompts, labels, **kwargs):
    return openrlhf(queries, prompts, labels)


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(data_source == "gsm" and solution_str == ground_truth)


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [verl(*row) for row in zip(data_sources, solution_strs, ground_truths, strict=True)]


def verl_by_star(solution_str, ground_truth, **kwargs):
    return float(solution_str == ground_truth)


async def verl_awaited(data_source, solution_str, ground_truth, extra_info=None):
    return verl(data_source, solution_str, ground_truth)


def trl(prompts, completions, **kwargs):
    assert prompts == ["2+2=", "2+2="]
    return [float(c == answer) for c, answer in zip(completions, kwargs["answer"], strict=True)]


def trl_completions(completions, solution, **kwargs):
    return [float(c == answer) for c, answer in zip(completions, solution, strict=True)]


def trl_with_ids(prompts, completions, completion_ids, **kwargs):
    return trl(prompts, completions, **kwargs)


def trl_without_more(completions, solution):
    return trl_completions(completions, solution)


def right_answers_third(prompts, responses, answers):
    return [float(r == "4") for r in responses]


@pytest.mark.parametrize(
    ("function", "trainer"),
    [
        (openrlhf, "OpenRLHF"),
        (openrlhf_later, "OpenRLHF"),
        (verl, "verl"),
        (verl_batch, "verl"),
        (verl_by_star, "verl"),
        (verl_awaited, "verl"),
        (trl, "TRL"),
        (trl_completions, "TRL"),
        (trl_with_ids, "TRL"),
        (trl_without_more, "TRL"),
        (right_answers_third, "another trainer"),
    ],
)
def test_another_trainers_function_is_refused_with_lines_that_adapt_it(function: Callable, trainer: str) -> None:
    with pytest.raises(RewardError) as raised:
        check_arguments(function, f"graders:{function.__name__}", {})
    message = str(raised.value)
    names = ", ".join(p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD)
    assert f"reward function graders:{function.__name__}: its parameters ({names}) are those of {trainer}" in message
    scores = adapted(function, message)(["2+2=", "2+2="], ["4", "4"], COLUMNS)
    assert scores == ([1.0, 1.0] if function is right_answers_third else [1.0, 0.0])


def adapted(function: Callable, message: str) -> Callable[..., Any]:
    """What the lines of the message define."""
    lines = [line[4:] for line in message.splitlines() if line.startswith(("    def", "    async def", "        "))]
    assert len(lines) == 2
    there: dict[str, Any] = {function.__name__: function}
    exec("\n".join(lines), there)
    found = there["my_reward"]
    return (lambda *given: asyncio.run(found(*given))) if inspect.iscoroutinefunction(found) else found


def ours(prompts, responses, columns): ...
def with_more(prompts, responses, columns, *, labels="labels"): ...
def short(p, r, c): ...
def questions(questions, responses, columns): ...
def completions_of_ours(prompts, completions, columns): ...
def rest(*args): ...


@pytest.mark.parametrize("function", [ours, with_more, short, questions, completions_of_ours, rest])
def test_names_that_say_nothing_else_are_taken_by_place(function: Callable) -> None:
    check_arguments(function, f"graders:{function.__name__}", {})


def test_swapped_places_are_another_trainers() -> None:
    def swapped(responses, prompts, columns): ...

    assert adapter(inspect.signature(swapped), "graders:swapped", awaited=False) is not None
