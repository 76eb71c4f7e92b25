"""The section `data.environment` of a config: a class, an agent or verifiers, who talk with the model."""

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

Kind = Literal["class", "agent", "verifiers"]
# `class` is a keyword of Python: no class body can declare it
_TEXT = "The Python class, as package.module:Class. Give one of class, agent and verifiers."
_CLASS: dict[str, Any] = {"class": (FunctionName | None, Field(default=None, description=_TEXT))}
_OfClass = create_model("_OfClass", __base__=Section, **_CLASS)


class EnvironmentConfig(_OfClass):
    """A conversation of the model with an instance of a class, or with an agent, one a row of the rollout."""

    agent: FunctionName | None = None
    """An agent that speaks to an OpenAI-compatible URL: `async def run(base_url, row)`, as package.module:function."""
    verifiers: Annotated[PathText, Field(min_length=1)] | None = None
    """An environment of the package verifiers, by the name of the taskset's module. A row has a task's number in the
    column task."""
    python: Annotated[PathText, Field(min_length=1)] | None = None
    """The Python in whose environment verifiers 0.4 and the taskset are installed. Only with verifiers."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the class, or more of the agent's; with verifiers the environment's config."""
    max_turns: PositiveInt = 8
    """Turns of the model in a row, at most. An agent's further request is refused."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn of the model, at most. null: what is left of the sequence."""
    parts: dict[PartName, FiniteFloat] = {}
    """Where the reward is a dictionary: key -> weight."""
    tool_parser: str = "hermes"
    """vLLM's parser of the model's tool calls, where the class or the agent's requests have tools. One that does not
    read the chat template's own calls is refused for a class; for an agent a line tells."""
    earlier_turns: Literal["refuse", "keep", "branch"] = "refuse"
    """What happens where the chat template renders an earlier turn in another way, or an agent's request has another
    conversation. refuse ends the run at the start, or fails the row. keep leaves tokens as they were sampled, whatever
    the template does. branch begins another sequence of the row."""
    call_seconds: PositiveFloat = 60.0
    """Seconds of one call of the class, from the beginning; of an agent, between an answer and the next request."""
    row_seconds: PositiveFloat | None = None
    """Seconds of a row from its first turn or its agent's start, generation included. null: no limit."""
    rollout_seconds: PositiveFloat | None = None
    """Seconds of a whole rollout. Rows that have not ended then have failed. null: no limit but the watchdog's."""
    num_workers: PositiveInt | None = None
    """Processes per rank for instances or agents. null: a share of the machine's cores, at most 8."""
    on_error: Literal["fail_row", "end_run"] = "fail_row"
    """What happens when the class or agent raises, is late or ends the process. fail_row counts the row and trains on
    nothing of it, or passes over a row whose start raises; end_run ends the run."""
    prompt: Literal["request", "column"] = "request"
    """What the prompt of an agent's row is. request: the agent's first request. column: the messages of
    data.prompt_key, with which that request has to agree."""
    concurrency: PositiveInt = 32
    """Instances or agents at a time in each process. Other rows begin when one of these has ended."""
    listen: str = "127.0.0.1"
    """The IP address at which agents reach the model. One that is not loopback needs token_file."""
    token_file: PathText | None = None
    """A file whose only word agents have to send as their API key. null: none is asked for."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if all(getattr(self, name) is None for name in KINDS):
            raise ValueError(
                "names nobody who answers the model: give class: package.module:Class, agent: package.module:function, "
                "or verifiers: NAME with python: PATH"
            )
        if self.listen != "127.0.0.1":
            _check_address(self.listen, self.token_file)
        return self

    @property
    def kind(self) -> Kind:
        if self.verifiers is not None:
            return "verifiers"
        return "class" if self.agent is None else "agent"

    @property
    def is_agent(self) -> bool:
        """Whether rows are requests to a URL."""
        return self.kind != "class"

    @property
    def path(self) -> str:
        """package.module:Class, or package.module:function of an agent; of verifiers our own."""
        return VERIFIERS_AGENT if self.kind == "verifiers" else str(getattr(self, self.kind))

    @property
    def called_with(self) -> dict[str, Any]:
        """Keyword arguments of the class or agent at `path`."""
        if self.kind != "verifiers":
            return self.arguments
        own = {"name": self.verifiers, "python": self.python, "arguments": self.arguments}
        return {**own, "parts": list(self.parts), "token_file": self.token_file}

    @property
    def begins_rows(self) -> bool:
        """Whether prompts are not in the data file."""
        return not self.is_agent or self.prompt == "request"

    @property
    def field(self) -> str:
        """What messages call it."""
        return f"data.environment.{self.kind} = {getattr(self, self.kind)}"

    @property
    def several(self) -> bool:
        """Whether a row may have several sequences."""
        return self.earlier_turns == "branch"

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each part of the reward; one where it is a number."""
        return tuple(self.parts.values()) or (1.0,)


KINDS = ("class", "agent", "verifiers")
VERIFIERS_AGENT = "hybridflow.environments.verifiers_agent:run"


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
