"""The section `data.environment` of a config: a class of the user's that talks with the model over many turns."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, JsonValue, PositiveFloat, PositiveInt, create_model

from hybridflow.config.rewards import FunctionName, PartName
from hybridflow.config.section import Section

# `class` is a keyword of Python: no class body can declare it
_CLASS: dict[str, Any] = {"class": (FunctionName, Field(description="The Python class, as package.module:Class."))}
_OfClass = create_model("_OfClass", __base__=Section, **_CLASS)


class EnvironmentConfig(_OfClass):
    """A conversation of the model with an instance of a class, one instance a row of the rollout."""

    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the class."""
    max_turns: PositiveInt = 8
    """Turns of the model in a row, at most."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn of the model, at most. null: what is left of sampling.max_response_length."""
    parts: dict[PartName, FiniteFloat] = {}
    """For a class whose reward is a dictionary: its keys, each with a weight."""
    tool_parser: str = "hermes"
    """vLLM's parser of the model's tool calls. Only for a class with tools."""
    earlier_turns: Literal["refuse", "keep"] = "refuse"
    """What happens with a chat template that renders an earlier turn in another way. refuse ends the run; keep leaves
    the tokens as they were sampled."""
    call_seconds: PositiveFloat = 60.0
    """Seconds of one call of the class, from its beginning."""
    row_seconds: PositiveFloat | None = None
    """Seconds of a whole row, generation included. null: no limit."""
    num_workers: PositiveInt | None = None
    """Processes per rank for instances. null: a share of the machine's cores, at most 8."""
    on_error: Literal["fail_row", "end_run"] = "fail_row"
    """What happens when the class raises, is late or ends its process. fail_row counts the row and trains on nothing
    of it; end_run ends the run."""

    @property
    def path(self) -> str:
        """package.module:Class."""
        return str(getattr(self, "class"))

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each part of the reward; one where it is a number."""
        return tuple(self.parts.values()) or (1.0,)


def class_alone(given: Any) -> Any:
    """A text is the class alone."""
    return {"class": given} if isinstance(given, str) else given


EnvironmentKey = Annotated[
    EnvironmentConfig, BeforeValidator(class_alone, json_schema_input_type=FunctionName | EnvironmentConfig)
]
