"""The config's `reward` section but for the models: functions, remote models, and what training makes of a score."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from hybridflow.config.section import Section

FunctionName = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]  # package.module:function
PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]


class RewardFunctionConfig(Section):
    function: FunctionName
    """The Python function, as package.module:function."""
    weight: float = 1.0
    """The weight of this function's score in the sum."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the function, beside prompts, responses and columns."""
    parts: dict[PartName, FiniteFloat] = {}
    """For a function that returns a dictionary per row: key -> weight."""
    per: Literal["row", "group", "batch"] = "row"
    """What one call gets: one row, all responses to a prompt, or the whole batch on one rank."""
    background: bool = True
    """Whether a prompt is scored as soon as all responses exist, during generation. Always false with per: batch."""
    timeout_seconds: PositiveFloat | None = None
    """Seconds per row. null: reward.timeout_seconds."""
    concurrency: PositiveInt = 16
    """Calls of an async function at the same time, on each rank."""

    @property
    def shapes_length(self) -> bool:
        """Whether the score is a penalty of length, which says nothing on what is right."""
        return self.function in ("hybridflow.rewards:length_penalty", "hybridflow.rewards.texts:length_penalty")


class EvalRewardConfig(Section):
    """The function whose 1.0 counts as right; a text is the function alone."""

    function: FunctionName
    """The Python function, as package.module:function."""
    arguments: dict[str, JsonValue] | None = None
    """Keyword arguments of the function. null: those of the same function in reward.functions."""

    @model_serializer(mode="wrap")
    def _as_given(self, whole: SerializerFunctionWrapHandler) -> Any:
        return self.function if self.arguments is None else whole(self)


def _function_alone(given: Any) -> Any:
    return {"function": given} if isinstance(given, str) else given


EvalRewardKey = Annotated[
    EvalRewardConfig, BeforeValidator(_function_alone, json_schema_input_type=FunctionName | EvalRewardConfig)
]


class RemoteRewardConfig(Section):
    """A reward model behind HTTP, one request a response.

    json: POST of {"prompt": ..., "response": ..., "columns": {...}}, whose answer is a number or {"score": number}.
    openai: a judge behind POST URL/chat/completions, the score in whose answer, in [lowest, highest], counts.
    """

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]
    """The address of the service, http or https."""
    kind: Literal["json", "openai"] = "json"
    """json posts prompt, response and columns and reads a score. openai asks a judge at URL/chat/completions."""
    weight: float = 1.0
    """The weight of this score in the sum."""
    model: str | None = None
    """For openai: the model's name at the service."""
    template: str = (
        "Rate the response to the prompt by a number from 0 (worst) to 1 (best). End with the number alone.\n\n"
        "Prompt:\n{prompt}\n\nResponse:\n{response}"
    )
    """For openai: the question to the judge. {prompt}, {response} and {COLUMN} are replaced."""
    max_tokens: PositiveInt = 256
    """For openai: tokens of the judge's answer, at most."""
    lowest: FiniteFloat = 0.0
    """For openai: the lowest valid number of the judge."""
    highest: FiniteFloat = 1.0
    """For openai: the highest valid number of the judge."""
    api_key_file: str | None = None
    """A file whose first line is sent as `Authorization: Bearer`. null: no key."""
    request_seconds: PositiveFloat = 60.0
    """Seconds of one attempt."""
    retries: NonNegativeInt = 4
    """Further attempts after a timeout, a broken connection, or status 408, 409, 425, 429 or 5xx. 0: none."""
    backoff_seconds: PositiveFloat = 1.0
    """Seconds before the second attempt. Each later wait is twice as long."""
    max_in_flight: PositiveInt = 32
    """Requests at the same time, on each rank."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest = {self.lowest} is not below highest = {self.highest}")
        return self

    def seconds(self) -> float:
        """That all attempts at one response and the waits between them may take."""
        waits = self.backoff_seconds * (2.0**self.retries - 1.0)
        return (self.retries + 1) * self.request_seconds + waits + 5.0


class OverlongConfig(Section):
    """DAPO's overlong shaping: what the last tokens before the limit of a prompt's responses cost."""

    buffer: PositiveInt
    """Tokens before the limit in which a response costs more, token by token."""
    factor: NonNegativeFloat = 1.0
    """The penalty of a response of full length. 0 turns it off."""


SpecialTokens = Literal["content", "all", "none"]


class ScoringConfig(Section):
    functions: tuple[RewardFunctionConfig, ...] = ()
    """Python functions that score a response."""
    remote: tuple[RemoteRewardConfig, ...] = ()
    """Reward models behind HTTP."""
    timeout_seconds: PositiveFloat = 60.0
    """Seconds per row of a reward function. A call of n rows has n times as long."""
    num_workers: PositiveInt | None = None
    """Processes per rank for reward functions. null: a share of the machine's cores, at most 8."""
    memory_gib: PositiveFloat | None = 4.0
    """GiB of memory for each process of num_workers, child processes included. null: no limit."""
    max_processes: PositiveInt = 64
    """Child processes of each process of num_workers, at most."""
    on_error: Literal["auto", "stop", "score"] = "auto"
    """After a failed call, stop ends the run and score takes error_score. auto is stop, but a shipped function
    that times out or crashes scores 0."""
    error_score: FiniteFloat | None = None
    """The score of each row of a failed call. Only with on_error: score."""
    special_tokens: SpecialTokens = "content"
    """Special tokens that reward functions see: content, such as <think>; all; or none."""
    clip_score: PositiveFloat | None = None
    """Scores are clipped to [-clip_score, clip_score]. null: no clipping."""
    normalization: Literal["none", "batch", "running"] = "none"
    """Scores less their mean, divided by their standard deviation: of the batch, or running over all iterations."""
    truncation_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of a response that reached the limit of length. 0 turns it off."""
    overlong: OverlongConfig | None = None
    """A penalty for responses close to the limit of length. null: none."""
