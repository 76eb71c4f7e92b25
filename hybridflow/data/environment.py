"""The environment of a config as a run reads it: the class, its processes, and what the chat template makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import DataConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.data.continuations import Continuations
from hybridflow.data.end_tokens import EndTokens
from hybridflow.data.prompts import Begun
from hybridflow.data.rows import Row, RowError
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from hybridflow.environments.classes import described
from hybridflow.environments.pool import EnvironmentPool


@dataclass(frozen=True)
class EnvironmentInputs:
    pool: EnvironmentPool
    continuations: Continuations

    def first_messages(self, rows: Sequence[Row]) -> list[Begun | RowError]:
        """What each row begins with, by an instance that ends again."""
        answers = self.pool.first_messages([row.fields for row in rows])
        return [
            Begun(answer.value["messages"], self.continuations.fields(row.fields))
            if not answer.problem
            else RowError(f"{row.where}: {self.pool.field}: {answer.problem}", "not started")
            for row, answer in zip(rows, answers, strict=True)
        ]


def environment_inputs(
    data: DataConfig, scoring: ScoringConfig, tokenizer: PreTrainedTokenizerBase, ends: EndTokens, *, num_ranks: int
) -> EnvironmentInputs | None:
    """None where the config has none. num_ranks: on this machine. Errors: ConfigError."""
    config = data.environment
    if config is None:
        return None
    found = described(config.path, config.arguments)
    options = TemplateOptions(data.chat_template_kwargs, data.message_format)
    template, keeps = ChatTemplate(tokenizer, options), config.earlier_turns == "keep"
    continuations = Continuations.of(template, found.schemas, ends.of_template, keeps=keeps)
    return EnvironmentInputs(EnvironmentPool(config, found, scoring, num_ranks=num_ranks), continuations)
