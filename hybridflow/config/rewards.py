"""The config's `reward` section but for its models: functions, remote models, and what training makes of a score."""

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
    weight: float = 1.0
    arguments: dict[str, JsonValue] = {}  # what the function takes by keyword, beside prompts, responses and columns
    parts: dict[PartName, FiniteFloat] = {}  # of one that returns a dictionary a row: its keys, and their weights
    # what it is called with in one list: one row; the responses to a prompt; all rows of the rollout, on one rank
    per: Literal["row", "group", "batch"] = "row"
    # true: called while responses are generated, for each prompt when its responses are there; false, and always where
    # per is batch: when all responses are there
    background: bool = True
    timeout_seconds: PositiveFloat | None = None  # of a row; None: reward.timeout_seconds
    concurrency: PositiveInt = 16  # of an `async def`: calls under way at a time, on each rank


class EvalRewardConfig(Section):
    """The function whose 1.0 counts as right; a text is the function alone."""

    function: FunctionName
    # what it takes by keyword; None: what the same function has in reward.functions, if it stands there
    arguments: dict[str, JsonValue] | None = None

    @model_serializer(mode="wrap")
    def _as_given(self, whole: SerializerFunctionWrapHandler) -> Any:
        return self.function if self.arguments is None else whole(self)


def _function_alone(given: Any) -> Any:
    return {"function": given} if isinstance(given, str) else given


EvalRewardKey = Annotated[EvalRewardConfig, BeforeValidator(_function_alone)]


class RemoteRewardConfig(Section):
    """A reward model behind HTTP, one request a response.

    json: POST of {"prompt": ..., "response": ..., "columns": {...}}, whose answer is a number or {"score": number}.
    openai: a judge behind POST URL/chat/completions, the last number of whose answer, in [lowest, highest], counts.
    """

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]
    kind: Literal["json", "openai"] = "json"
    weight: float = 1.0
    model: str | None = None  # openai: its name there
    # openai: what the judge is asked; {prompt}, {response} and {COLUMN} are put in
    template: str = (
        "Rate the response to the prompt by a number from 0 (worst) to 1 (best). End with the number alone.\n\n"
        "Prompt:\n{prompt}\n\nResponse:\n{response}"
    )
    max_tokens: PositiveInt = 256  # openai: of the judge's answer
    lowest: FiniteFloat = 0.0  # openai: an answer beyond these is an error
    highest: FiniteFloat = 1.0
    api_key_file: str | None = None  # its first line is sent as `Authorization: Bearer`
    request_seconds: PositiveFloat = 60.0  # of one attempt
    retries: NonNegativeInt = 4  # after no answer in time, a broken connection, or status 408, 409, 425, 429 or 5xx
    backoff_seconds: PositiveFloat = 1.0  # before the first of them; each later one waits twice as long
    max_in_flight: PositiveInt = 32  # requests at a time, on each rank

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "openai" and self.model is None:
            raise ValueError("kind: openai needs model, the name that the server knows it by")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest = {self.lowest} is not below highest = {self.highest}")
        return self

    def seconds(self) -> float:
        """That all attempts at one response and the waits between them may take."""
        waits = self.backoff_seconds * (2.0**self.retries - 1.0)
        return (self.retries + 1) * self.request_seconds + waits + 5.0


class OverlongConfig(Section):
    """DAPO's overlong shaping: what the last tokens before the limit of a prompt's responses cost."""

    buffer: PositiveInt  # tokens: nothing is taken off before the last so many, each of which costs factor / buffer
    factor: NonNegativeFloat = 1.0  # what a response of the full length costs


SpecialTokens = Literal["content", "all", "none"]


class ScoringConfig(Section):
    functions: tuple[RewardFunctionConfig, ...] = ()
    remote: tuple[RemoteRewardConfig, ...] = ()
    timeout_seconds: PositiveFloat = 60.0  # a row; a call of n rows has n times as long, and is then killed
    num_workers: PositiveInt | None = None  # processes a rank; None: a share of the machine's cores, 8 at most
    memory_gib: PositiveFloat | None = 4.0  # of one of them with all that it starts; null: no limit
    max_processes: PositiveInt = 64  # that one of them may have started
    # when a function raises, takes too long, ends its process or returns no score. stop: the run ends. score:
    # error_score is each of its parts, of the row, or of all rows of the call where `per` is not row. auto: stop, but a
    # row that a shipped function takes too long for, or ends its process by, scores 0.0
    on_error: Literal["auto", "stop", "score"] = "auto"
    error_score: FiniteFloat | None = None
    # those that functions and samples.jsonl see in a response. content: such as <think>, but none that ends or pads a
    # response, begins a text, or is of the chat template's turns
    special_tokens: SpecialTokens = "content"
    clip_score: PositiveFloat | None = None  # scores are held within [-clip_score, clip_score]
    normalization: Literal["none", "batch", "running"] = "none"
    truncation_penalty: NonNegativeFloat = 0.0  # taken off the score of a response cut at max_response_length
    overlong: OverlongConfig | None = None  # taken off the scores of those that come near it

    @model_validator(mode="after")
    def _check_errors(self) -> Self:
        if self.on_error == "score" and self.error_score is None:
            raise ValueError("on_error: score needs error_score, what a row without a score counts as")
        if self.on_error != "score" and self.error_score is not None:
            raise ValueError(f"error_score = {self.error_score} is for on_error: score; it is {self.on_error}")
        return self
