"""How responses are drawn: the section `sampling`, as it is for all prompts and for those of some length."""

from typing import Annotated, Any, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.config.section import Section

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


class PromptLengthConfig(Section):
    """What is another for prompts of some length than `sampling` says. None: as there."""

    up_to: PositiveInt  # prompt tokens, inclusive: the first bucket that a prompt fits in is its own
    samples_per_prompt: PositiveInt | None = None
    temperature: PositiveFloat | None = None
    max_response_length: PositiveInt | None = None  # at most that of the section

    def replaced(self) -> dict[str, Any]:
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
    max_response_length: PositiveInt  # tokens, the end token included
    min_response_length: NonNegativeInt = 0
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0  # 0: all
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: PositiveFloat = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[NonNegativeInt, ...] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    by_prompt_length: tuple[PromptLengthConfig, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_response_length > self.max_response_length:
            raise ValueError(
                f"min_response_length = {self.min_response_length} exceeds "
                f"max_response_length = {self.max_response_length}"
            )
        return self

    def sections(self) -> "tuple[SamplingConfig, ...]":
        """What holds in each bucket, and last what holds for longer prompts."""
        alone = self.model_copy(update={"by_prompt_length": ()})
        return (*(alone.model_copy(update=bucket.replaced()) for bucket in self.by_prompt_length), alone)

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

    def changed_distribution(self) -> list[str]:
        """The keys, as `sampling.top_p = 0.9`, by which tokens are not drawn from the whole softmax at a temperature.

        min_response_length and stop words are not among them: of a response they change the end alone.
        """
        neutral = SamplingConfig(max_response_length=1)
        keys = ["top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
        keys += ["bad_words", "allowed_token_ids", "logit_bias"]
        return [f"sampling.{key} = {getattr(self, key)}" for key in keys if getattr(self, key) != getattr(neutral, key)]
