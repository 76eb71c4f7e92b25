"""How responses are drawn: the section `sampling`, as it is for all prompts and for those of some length."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.config.section import Section
from hybridflow.errors import Mendable

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


LEAST_TEMPERATURE = 0.01  # of vLLM 0.32.0: below, vLLM samples at this one, and says so in a log line


def _sampled_at(temperature: float) -> float:
    if temperature < LEAST_TEMPERATURE:
        raise Mendable(
            f"{temperature} is below {LEAST_TEMPERATURE}: vLLM would sample at {LEAST_TEMPERATURE}, and the trainer's "
            "log-probs would be of another temperature",
            {"": [LEAST_TEMPERATURE]},
        )
    return temperature


Temperature = Annotated[PositiveFloat, AfterValidator(_sampled_at)]


class PromptLengthConfig(Section):
    """What is another for prompts of some length than `sampling` says. None: as there."""

    up_to: PositiveInt
    """Tokens of the longest prompt of this bucket. A prompt belongs to the first bucket that it fits in."""
    samples_per_prompt: PositiveInt | None = None
    """Responses to each prompt of the bucket. null: as sampling says."""
    temperature: Temperature | None = None
    """The temperature of softmax in the bucket. null: as sampling says."""
    max_response_length: PositiveInt | None = None
    """Tokens of the longest response in the bucket. null: as sampling says, which is also the most."""

    def replaced_values(self) -> dict[str, Any]:
        return self.model_dump(exclude={"up_to"}, exclude_none=True)


REPLACED = tuple(key for key in PromptLengthConfig.model_fields if key != "up_to")


class SamplingConfig(Section):
    """How responses are drawn; the names and meanings are vLLM's.

    by_prompt_length: buckets in ascending order; prompts longer than the last are sampled as the section says. A row is
    trained on at the temperature that it was sampled at, is cut at the limit it was generated under, and
    reward.overlong counts from that limit; loss_mean constant divides by the section's max_response_length. Greedy
    responses, to held-out prompts and of remax, have the limit of their bucket, one response a prompt, and temperature
    0. Where samples_per_prompt varies the sequences of an iteration do too: algorithm.update.mini_batch_size is then
    the most of a step, and an epoch is cut in as few mini-batches as that allows, of nearly equal size.
    """

    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt."""
    max_response_length: PositiveInt
    """Tokens of the longest response, the end token included."""
    expected_response_length: PositiveInt | None = None
    """Tokens of the mean response, for plans and the size of the KV cache. null: max_response_length."""
    min_response_length: NonNegativeInt = 0
    """Tokens of the shortest response. 0: no limit."""
    temperature: Temperature = 1.0
    """The temperature of softmax, in generation and in training, 0.01 at least. 1: neutral."""
    top_p: Fraction = 1.0
    """Tokens are drawn from the most likely ones with this much probability together. 1: all tokens."""
    top_k: NonNegativeInt = 0
    """Tokens are drawn from this many of the most likely ones. 0: all tokens."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Tokens are drawn from those with this share of the highest probability. 0: all tokens."""
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from the logits of tokens that the response already has. 0 turns it off."""
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from the logits of tokens for each time that the response has them. 0 turns it off."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides the logits of tokens that the prompt or the response already has. 1 turns it off."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a response, beside the model's own end tokens."""
    bad_words: tuple[str, ...] = ()
    """Texts that no response may contain."""
    allowed_token_ids: tuple[NonNegativeInt, ...] | None = None
    """The only token ids that may be drawn. null: all."""
    logit_bias: dict[int, float] | None = None
    """Numbers added to logits, by token id. null: none."""
    ignore_eos: bool = False
    """Whether generation continues after an end token, up to the limit."""
    by_prompt_length: tuple[PromptLengthConfig, ...] = ()
    """Other values for prompts up to some length, in ascending order. Longer prompts follow sampling itself."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_response_length > self.max_response_length:
            raise Mendable(
                f"min_response_length = {self.min_response_length} exceeds "
                f"max_response_length = {self.max_response_length}",
                {"min_response_length": [self.max_response_length], "max_response_length": [self.min_response_length]},
            )
        if self.mean_response_length > self.max_response_length:
            raise Mendable(
                f"expected_response_length = {self.mean_response_length} exceeds "
                f"max_response_length = {self.max_response_length}",
                {"expected_response_length": [self.max_response_length, None]},
            )
        return self

    @property
    def mean_response_length(self) -> int:
        return self.expected_response_length or self.max_response_length

    def sections(self) -> "tuple[SamplingConfig, ...]":
        """What holds in each bucket, and last what holds for longer prompts."""
        alone = self.model_copy(update={"by_prompt_length": ()})
        return (*(alone.model_copy(update=bucket.replaced_values()) for bucket in self.by_prompt_length), alone)

    @property
    def buckets(self) -> LengthBuckets[int]:
        """The number of a prompt's entry in `sections`."""
        return LengthBuckets(self._ends, tuple(range(len(self._ends) + 1)))

    @property
    def samples(self) -> LengthBuckets[int]:
        """samples_per_prompt of each bucket."""
        return LengthBuckets(self._ends, tuple(section.samples_per_prompt for section in self.sections()))

    @property
    def temperatures(self) -> LengthBuckets[float]:
        return LengthBuckets(self._ends, tuple(section.temperature for section in self.sections()))

    @property
    def limits(self) -> LengthBuckets[int]:
        """max_response_length of each bucket, in tokens."""
        return LengthBuckets(self._ends, tuple(section.max_response_length for section in self.sections()))

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(bucket.up_to for bucket in self.by_prompt_length)

    def check_buckets(self, max_prompt_length: int, *, may_vary: bool) -> None:
        """Those of by_prompt_length ascend, each is of some prompt, and says what the section allows.

        may_vary: prompts may have unlike numbers of responses. Errors: ValueError.
        """
        before = 0
        for i, bucket in enumerate(self.by_prompt_length):
            name = f"sampling.by_prompt_length.{i}"
            if not bucket.replaced_values():
                raise ValueError(
                    f"{name}: replaces nothing: give one of {', '.join(REPLACED)}, or leave the bucket out"
                )
            if bucket.up_to <= before:
                why = f"{name}.up_to = {bucket.up_to}: buckets ascend, the one before ends at {before}"
                raise Mendable(why, {f"{name}.up_to": [before + 1]})
            if before >= max_prompt_length:
                raise ValueError(
                    f"{name}.up_to = {bucket.up_to}: no prompt is in this bucket, the one before ends at {before} and "
                    f"data.max_prompt_length = {max_prompt_length}"
                )
            self._check_limit(f"{name}.max_response_length", bucket.max_response_length)
            if not may_vary and self.samples.varies and bucket.samples_per_prompt:
                raise Mendable(
                    f"{name}.samples_per_prompt = {bucket.samples_per_prompt}: a custom flow may need equal numbers of "
                    "responses. Give all buckets the value of sampling.samples_per_prompt",
                    {f"{name}.samples_per_prompt": [None]},
                )
            before = bucket.up_to

    def _check_limit(self, name: str, limit: int | None) -> None:
        """The section's limit is the longest: positions, KV cache and budgets of tokens are made for it."""
        if limit is not None and limit > self.max_response_length:
            why = f"{name} = {limit} exceeds sampling.max_response_length = {self.max_response_length}"
            raise Mendable(why, {name: [self.max_response_length]})
        if limit is not None and limit < self.min_response_length:
            why = f"{name} = {limit} is below sampling.min_response_length = {self.min_response_length}"
            raise Mendable(why, {name: [self.min_response_length]})

    def changed_distribution(self) -> list[str]:
        """The keys, as `sampling.top_p = 0.9`, by which tokens are not drawn from the whole softmax at a temperature.

        Up to min_response_length no end token can be drawn. Stop words change the end alone: they are not among these.
        """
        neutral = SamplingConfig(max_response_length=1)
        keys = ["top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
        keys += ["bad_words", "allowed_token_ids", "logit_bias", "min_response_length"]
        return [f"sampling.{key} = {getattr(self, key)}" for key in keys if getattr(self, key) != getattr(neutral, key)]
