"""Tasks of the package reasoning-gym in place of data files: `data.train: {reasoning_gym: [{name: chain_sum, ...}]}`.

A task makes rows from (seed, size, config), and the task's scorer gives the reward.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from hybridflow.config.section import Section
from hybridflow.errors import Mendable

KEY = "reasoning_gym"
RELEASE = "0.1.25"  # the one whose scorers were read for EXECUTES, and whose rows were compared for UNREPEATABLE
SCORER = "hybridflow.rewards:reasoning_gym"
# Tasks whose scorers hand the model's answer to eval or to sympy's parse_expr, which is eval. tests/rewards/test_gym.py
# has an answer that writes a file scored by every task.
EXECUTES = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion".split()
)
UNREPEATABLE = {"codeio": "its rows are not the same each time", "composite": "name the tasks that it is made of"}
SYSTEM_PROMPTS = ("default", "DeepSeekZero", "simple", "direct", "chain_of_draft")  # names in the package
OWN_KEYS = ("seed", "size")  # of a task's config in the package, which stand beside `config` here


class TaskConfig(Section):
    """One task."""

    name: Annotated[str, Field(pattern=r"^\w+$")]
    """The task's name in reasoning-gym, such as chain_sum."""
    weight: PositiveFloat | None = None
    """The share of this task among all rows, in proportion to the others. null: the number of rows."""
    size: PositiveInt
    """How many rows the task has."""
    seed: NonNegativeInt
    """Row i is made from seed + i: seeds of training and held-out rows are further apart than size."""
    config: dict[str, JsonValue] = {}
    """Keys of the task in reasoning-gym, such as {min_terms: 2, max_terms: 4}."""
    execute: bool = False
    """Whether the scorer runs in a confined process. Required by tasks whose scorers execute the model's answer."""

    @property
    def title(self) -> str:
        return f"{KEY}:{self.name}"

    @property
    def rows(self) -> range:
        """The number that each row is made from."""
        return range(self.seed, self.seed + self.size)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name in UNREPEATABLE:
            raise ValueError(f"name = {self.name}: cannot be used: {UNREPEATABLE[self.name]}")
        for key in OWN_KEYS:
            if key in self.config:
                raise ValueError(f"config.{key} = {self.config[key]!r}: give {key} beside config, not in it")
        if self.name in EXECUTES and not self.execute:
            raise Mendable(
                f"name = {self.name}: its scorer executes the model's answer as Python. With execute the scorer "
                "runs in a confined process, as hybridflow.rewards:passes_tests runs programs",
                {"execute": [True]},
            )
        return self


class ReasoningGymConfig(Section):
    """Rows of tasks, one task after the other, or by their weights."""

    reasoning_gym: Annotated[tuple[TaskConfig, ...], Field(min_length=1)]
    """The tasks."""
    system_prompt: str | None = "default"
    """What stands before each question: a name (default, DeepSeekZero, simple, direct or chain_of_draft) of one of
    reasoning-gym's, or a text. null: nothing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        text = self.system_prompt
        if text is not None and re.fullmatch(r"\S*", text) and text not in SYSTEM_PROMPTS:
            raise ValueError(
                f"system_prompt = {text!r}: is neither one of {', '.join(SYSTEM_PROMPTS)} nor a text of several words"
            )
        without = [i for i, task in enumerate(self.reasoning_gym) if task.weight is None]
        if 0 < len(without) < len(self.reasoning_gym):
            raise ValueError(
                f"reasoning_gym.{without[0]}.weight: is missing, but other tasks have a weight. Give all tasks a "
                "weight, or none"
            )
        return self


def parse_tasks(given: Mapping[str, Any]) -> ReasoningGymConfig:
    """Errors: ValueError naming the place below the section's key, for the first thing that is wrong."""
    try:
        return ReasoningGymConfig(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        raised = problem.get("ctx", {}).get("error")
        if isinstance(raised, Mendable):
            raise raised.within(".".join(map(str, problem["loc"]))) from None
        raise ValueError(_problem_text(problem)) from None


def _problem_text(problem: Any) -> str:
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{place}: is required"
    if problem["type"] == "extra_forbidden":
        kind = TaskConfig if len(problem["loc"]) > 1 else ReasoningGymConfig
        return f"{place}: unknown key; known are {', '.join(kind.model_fields)}"
    if problem["type"] == "value_error":
        return f"{place}{'.' * bool(place)}{problem['ctx']['error']}"
    return f"{place} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def check_apart(train: ReasoningGymConfig, heldout: ReasoningGymConfig, key: str) -> None:
    """Errors: ValueError where a held-out row is one of those to train on. key: of the held-out tasks."""
    for i, held in enumerate(heldout.reasoning_gym):
        if held.weight is not None:
            raise Mendable(
                f"{key}.reasoning_gym.{i}.weight = {held.weight:g}: weights say how often a row is trained on, "
                "held-out rows are all used once",
                {f"{key}.reasoning_gym.{i}.weight": [None]},
            )
        for task in train.reasoning_gym:
            shared = range(max(held.rows.start, task.rows.start), min(held.rows.stop, task.rows.stop))
            if len(shared) and (held.name, held.config) == (task.name, task.config):
                raise Mendable(
                    f"{key}.reasoning_gym.{i}.seed = {held.seed}: row i is made from seed + i, so {len(shared)} rows "
                    f"of {held.name} are also in data.train. Give a seed from {task.rows.stop} on",
                    {f"{key}.reasoning_gym.{i}.seed": [task.rows.stop]},
                )
