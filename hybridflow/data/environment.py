"""The environment of a config as a run reads it: the user's code, its processes, and what the template makes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import DataConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.data.continuations import Continuations
from hybridflow.data.end_tokens import EndTokens
from hybridflow.data.prompts import Begun, FirstMessages
from hybridflow.data.rows import Row, RowError
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from hybridflow.environments.agents import agent_file
from hybridflow.environments.classes import described
from hybridflow.environments.pool import AgentPool, EnvironmentPool
from hybridflow.environments.verifiers_agent import number_of_tasks, task_problem
from hybridflow.rewards.specs import word_of


@dataclass(frozen=True)
class EnvironmentInputs:
    pool: EnvironmentPool
    continuations: Continuations

    def begins(self) -> FirstMessages:
        """What each row begins with, by an instance that ends again."""
        return self._first_messages

    def _first_messages(self, rows: Sequence[Row]) -> list[Begun | RowError]:
        answers = self.pool.first_messages([row.fields for row in rows])
        return [
            Begun(answer.value["messages"], self.continuations.fields(row.fields))
            if not answer.problem
            else RowError(f"{row.where}: {self.pool.field}: {answer.problem}", "not started")
            for row, answer in zip(rows, answers, strict=True)
        ]


@dataclass(frozen=True)
class AgentInputs:
    """token: that agents send. problem: why an agent can make nothing of a row's columns; nothing where it can."""

    pool: AgentPool
    continuations: Continuations
    token: str | None
    problem: Callable[[Mapping[str, Any]], str]

    def begins(self) -> FirstMessages | None:
        """None: with the data file's prompts."""
        return self._first_messages if self.pool.config.begins_rows else None

    def _first_messages(self, rows: Sequence[Row]) -> list[Begun | RowError]:
        problems = [self.problem(row.fields) for row in rows]
        return [
            RowError(f"{row.where}: {self.pool.field}: {problem}", "not started")
            if problem
            else Begun(None, row.fields)
            for row, problem in zip(rows, problems, strict=True)
        ]


def _no_problem(columns: Mapping[str, Any]) -> str:
    """An agent looks at its columns itself."""
    return ""


def environment_inputs(
    data: DataConfig, scoring: ScoringConfig, tokenizer: PreTrainedTokenizerBase, ends: EndTokens, *, num_ranks: int
) -> EnvironmentInputs | AgentInputs | None:
    """None where the config has none. num_ranks: on this machine. Errors: ConfigError; RewardError for the token."""
    config = data.environment
    if config is None:
        return None
    options = TemplateOptions(data.chat_template_kwargs, data.message_format)
    template, keeps = ChatTemplate(tokenizer, options), config.earlier_turns == "keep"
    if config.kind == "class":
        found = described(config.path, config.arguments)
        continuations = Continuations.of(template, found.schemas, ends.of_template, keeps=keeps)
        return EnvironmentInputs(EnvironmentPool(config, found, scoring, num_ranks=num_ranks), continuations)
    file = agent_file(config.path, config.called_with)
    problem: Callable[[Mapping[str, Any]], str] = _no_problem
    if config.verifiers is not None and config.python is not None:
        num_tasks = number_of_tasks(config.verifiers, config.python, config.arguments)
        problem = partial(task_problem, num_tasks=num_tasks)
    token = None if config.token_file is None else word_of(config.token_file, "data.environment.token_file")
    continuations = Continuations.of(template, (), ends.of_template, keeps=keeps)
    return AgentInputs(AgentPool(config, file, scoring, num_ranks=num_ranks), continuations, token, problem)
