"""The section `data.environment` of a config: a class, or an agent, that talks with the model over many turns."""

import ipaddress
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    JsonValue,
    PositiveFloat,
    PositiveInt,
    create_model,
    model_validator,
)

from hybridflow.config.rewards import FunctionName, PartName
from hybridflow.config.section import PathText, Section

# `class` is a keyword of Python: no class body can declare it
_TEXT = "The Python class, as package.module:Class. Give either class or agent."
_CLASS: dict[str, Any] = {"class": (FunctionName | None, Field(default=None, description=_TEXT))}
_OfClass = create_model("_OfClass", __base__=Section, **_CLASS)


class EnvironmentConfig(_OfClass):
    """A conversation of the model with an instance of a class, or with an agent, one a row of the rollout."""

    agent: FunctionName | None = None
    """An agent that speaks to an OpenAI-compatible URL: `async def run(base_url, row)`, as package.module:function."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the class, or more of the agent's."""
    max_turns: PositiveInt = 8
    """Turns of the model in a row, at most. An agent's further request is refused."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn of the model, at most. null: what is left of sampling.max_response_length."""
    parts: dict[PartName, FiniteFloat] = {}
    """Where the reward is a dictionary: its keys, each with a weight."""
    tool_parser: str = "hermes"
    """vLLM's parser of the model's tool calls, where the class or the agent's requests have tools."""
    earlier_turns: Literal["refuse", "keep"] = "refuse"
    """What happens with a chat template that renders an earlier turn in another way. refuse ends the run; keep leaves
    the tokens as they were sampled."""
    call_seconds: PositiveFloat = 60.0
    """Seconds of one call of the class, from its beginning; of an agent, between an answer and its next request."""
    row_seconds: PositiveFloat | None = None
    """Seconds of a whole row, generation included. null: no limit."""
    num_workers: PositiveInt | None = None
    """Processes per rank for instances or agents. null: a share of the machine's cores, at most 8."""
    on_error: Literal["fail_row", "end_run"] = "fail_row"
    """What happens when the class or agent raises, is late or ends its process. fail_row counts the row and trains on
    nothing of it; end_run ends the run."""
    prompt: Literal["request", "column"] = "request"
    """What the prompt of an agent's row is. request: the agent's first request. column: the messages of
    data.prompt_key, with which that request has to agree."""
    concurrency: PositiveInt = 32
    """Agents that run at a time in each process. Others wait."""
    listen: str = "127.0.0.1"
    """The IP address at which agents reach the model. One that is not loopback needs token_file."""
    token_file: PathText | None = None
    """A file whose only word agents have to send as their API key. null: none is asked for."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (getattr(self, "class") is None) == (self.agent is None):
            raise ValueError(
                "has both class and agent: leave one of them out"
                if self.agent is not None
                else "names nobody who answers the model: give class: package.module:Class, or agent: "
                "package.module:function"
            )
        fields = type(self).model_fields
        given = [name for name in OF_AGENTS if getattr(self, name) != fields[name].default]  # a resolved config has all
        if self.agent is None and given:
            raise ValueError(f"{given[0]} = {getattr(self, given[0])!r}: is for an agent, and this is a class")
        if self.listen != "127.0.0.1":
            _check_address(self.listen, self.token_file)
        return self

    @property
    def kind(self) -> Literal["class", "agent"]:
        return "class" if self.agent is None else "agent"

    @property
    def path(self) -> str:
        """package.module:Class, or package.module:function of an agent."""
        return str(getattr(self, self.kind))

    @property
    def begins_rows(self) -> bool:
        """Whether prompts are not in the data file."""
        return self.agent is None or self.prompt == "request"

    @property
    def field(self) -> str:
        """What messages call it."""
        return f"data.environment.{self.kind} = {self.path}"

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each part of the reward; one where it is a number."""
        return tuple(self.parts.values()) or (1.0,)


OF_AGENTS = ("prompt", "concurrency", "listen", "token_file")


def _check_address(address: str, token_file: str | None) -> None:
    """Errors: ValueError."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise ValueError(f"listen = {address}: is no IP address, such as 127.0.0.1 or 10.0.0.7") from None
    if parsed.is_unspecified:
        raise ValueError(f"listen = {address}: names no interface: give the address at which agents reach this host")
    if not parsed.is_loopback and token_file is None:
        raise ValueError(f"listen = {address}: is reached from other hosts: give token_file, whose word agents send")


def class_alone(given: Any) -> Any:
    """A text is the class alone."""
    return {"class": given} if isinstance(given, str) else given


EnvironmentKey = Annotated[
    EnvironmentConfig, BeforeValidator(class_alone, json_schema_input_type=FunctionName | EnvironmentConfig)
]
