"""The environment of a config as a run reads it: the user's code, the processes, and the chat template's part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from hybridflow.architecture.spec import read_spec
from hybridflow.config import ExperimentConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.environment import EnvironmentConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.data.continuations import Continuations
from hybridflow.data.end_tokens import EndTokens, end_tokens
from hybridflow.data.prompts import Begun
from hybridflow.data.rows import NotStarted, Row, RowError
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from hybridflow.data.tokenizers import load_tokenizer
from hybridflow.environments.agents import agent_file
from hybridflow.environments.classes import DescribedClass, described
from hybridflow.environments.pool import AgentPool, EnvironmentPool, name_of
from hybridflow.environments.verifiers_agent import number_of_tasks, task_problem
from hybridflow.parallel.agreement import check_agreement
from hybridflow.rewards.pool import Answer
from hybridflow.rewards.specs import word_of


@dataclass(frozen=True)
class EnvironmentInputs:
    """group: of the ranks that read the same rows at the same time; None of one rank."""

    pool: EnvironmentPool
    continuations: Continuations
    group: dist.ProcessGroup | None = None

    def first_messages(self, rows: Sequence[Row]) -> list[Begun | RowError]:
        """What each row begins with, by an instance that ends again, on one of the group's ranks.

        Collective over the group.
        """
        answers = self._answers([row.fields for row in rows])
        return [
            Begun(answer.value["messages"], self.continuations.fields(row.fields), self._not_started)
            if not answer.problem
            else self._not_started(f"{row.where}: {self.pool.field}: {answer.problem}")
            for row, answer in zip(rows, answers, strict=True)
        ]

    def _not_started(self, problem: str) -> RowError:
        if self.pool.config.on_error == "end_run":
            return RowError(problem, "not started")
        return NotStarted(problem)

    def hooks(self, key: str) -> dict[str, Any]:
        """What `load_prompts` takes. Ranks with different files would wait for each other, so a check precedes."""
        group = self.group
        agrees = {} if group is None else {"agrees": lambda digest: check_agreement({key: digest}, group)}
        return {"first_messages": self.first_messages, "start_ahead": self.start_ahead, **agrees}

    def start_ahead(self, rows: Sequence[Row]) -> None:
        """Begin what `first_messages` asks for next, on this rank."""
        self.pool.start_ahead([row.fields for row in rows if self._is_own(row.fields)])

    def _is_own(self, columns: Mapping[str, Any]) -> bool:
        """Whether the row begins on this rank: by the columns, so that a row begins where it was started ahead."""
        if self.group is None:
            return True
        return crc32(name_of(columns).encode()) % dist.get_world_size(self.group) == dist.get_rank(self.group)

    def _answers(self, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
        own = [number for number, columns in enumerate(rows) if self._is_own(columns)]
        answers = dict(zip(own, self.pool.first_messages([rows[number] for number in own]), strict=True))
        if self.group is not None:
            of_ranks: list[dict[int, Answer]] = [{}] * dist.get_world_size(self.group)
            dist.all_gather_object(of_ranks, answers, group=self.group)
            answers = {number: answer for of_rank in of_ranks for number, answer in of_rank.items()}
        return [answers[number] for number in range(len(rows))]


@dataclass(frozen=True)
class AgentInputs:
    """token: that agents send. problem: why an agent can make nothing of a row's columns; nothing where it can."""

    pool: AgentPool
    continuations: Continuations
    token: str | None
    problem: Callable[[Mapping[str, Any]], str]

    def hooks(self, key: str) -> dict[str, Any]:
        """What `load_prompts` takes of it; nothing where the data file has the prompts."""
        return {"first_messages": self._first_messages} if self.pool.config.begins_rows else {}

    def _first_messages(self, rows: Sequence[Row]) -> list[Begun | RowError]:
        problems = [self.problem(row.fields) for row in rows]
        return [
            RowError(f"{row.where}: {self.pool.field}: {problem}", "not started")
            if problem
            else Begun(None, row.fields)
            for row, problem in zip(rows, problems, strict=True)
        ]


def _no_problem(columns: Mapping[str, Any]) -> str:
    """An agent checks columns itself."""
    return ""


def environment_inputs(
    data: DataConfig,
    scoring: ScoringConfig,
    tokenizer: PreTrainedTokenizerBase,
    ends: EndTokens,
    *,
    num_ranks: int,
    group: dist.ProcessGroup | None = None,
) -> EnvironmentInputs | AgentInputs | None:
    """None where the config has none. num_ranks: on this machine. group: see `EnvironmentInputs`.

    Errors: ConfigError; RewardError for the token.
    """
    config = data.environment
    if config is None:
        return None
    if config.kind == "class":
        found, continuations = described_environment(data, config, tokenizer, ends)
        return EnvironmentInputs(EnvironmentPool(config, found, scoring, num_ranks=num_ranks), continuations, group)
    file = agent_file(config.path, config.called_with)
    problem: Callable[[Mapping[str, Any]], str] = _no_problem
    if config.verifiers is not None and config.python is not None:
        problem = partial(task_problem, num_tasks=number_of_tasks(config.verifiers, config.python, config.arguments))
    token = None if config.token_file is None else word_of(config.token_file, "data.environment.token_file")
    continuations = _continuations(data, config, tokenizer, ends, ())
    return AgentInputs(AgentPool(config, file, scoring, num_ranks=num_ranks), continuations, token, problem)


@dataclass(frozen=True)
class FoundEnvironment:
    """file: of the module of the class or agent. tools: their names; an agent names tools with each request."""

    file: str | None
    tools: tuple[str, ...]


def check_environment(config: ExperimentConfig) -> FoundEnvironment | None:
    """What a run would find of class or agent, tools and chat template; None without an environment.

    vLLM's parser of tool calls is not looked for, which takes long to load. Errors: ConfigError, CheckpointError.
    """
    environment, path = config.data.environment, Path(config.actor.model)
    if environment is None:
        return None
    if environment.verifiers is not None and environment.python is not None:
        number_of_tasks(environment.verifiers, environment.python, environment.arguments)
    if environment.is_agent:
        return FoundEnvironment(agent_file(environment.path, environment.called_with), ())
    if not path.is_dir():  # the check of the model reports this
        found = described(environment.path, environment.arguments)
    else:
        tokenizer = load_tokenizer(path)
        ends = end_tokens(path, tokenizer, read_spec(path).vocab_size, template=True)
        found, _ = described_environment(config.data, environment, tokenizer, ends)
    return FoundEnvironment(found.file, tuple(str(schema["function"]["name"]) for schema in found.schemas))


def described_environment(
    data: DataConfig, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase, ends: EndTokens
) -> tuple[DescribedClass, Continuations]:
    """The class, and the chat template for it; no process is left. Errors: ConfigError where either cannot be used."""
    found = described(config.path, config.arguments)
    return found, _continuations(data, config, tokenizer, ends, found.schemas)


def _continuations(
    data: DataConfig,
    config: EnvironmentConfig,
    tokenizer: PreTrainedTokenizerBase,
    ends: EndTokens,
    schemas: Sequence[Mapping[str, Any]],
) -> Continuations:
    options = TemplateOptions(data.chat_template_kwargs, data.message_format)
    template, turns = ChatTemplate(tokenizer, options), config.earlier_turns
    return Continuations.from_template(template, schemas, ends.of_template, earlier_turns=turns, ends=ends.ids)
