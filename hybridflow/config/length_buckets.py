"""A value that goes by the length of a prompt: `sampling.by_prompt_length` as code reads it. Pure Python, for a config.

limits = LengthBuckets((64, 256), (32, 512, 1024))    # up to 64 tokens, up to 256, longer
limits.for_lengths([64, 65, 300])                     # [32, 512, 1024]
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value", int, float)


@dataclass(frozen=True)
class LengthBuckets(Generic[Value]):
    """values[i] holds for prompts of at most ends[i] tokens and more than ends[i - 1]; the last, for longer ones.

    ends: ascending, one fewer than values.
    """

    ends: tuple[int, ...]
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        assert len(self.values) == len(self.ends) + 1, f"{len(self.ends)} ends for {len(self.values)} values"

    @property
    def varies(self) -> bool:
        return len(set(self.values)) > 1

    def for_length(self, length: int) -> Value:
        """The value for a prompt of so many tokens."""
        return self.values[bisect.bisect_left(self.ends, length)]

    def for_lengths(self, lengths: Sequence[int]) -> list[Value]:
        """The values for prompts of these lengths."""
        return [self.for_length(length) for length in lengths]


def always(value: Value) -> LengthBuckets[Value]:
    """The same for all prompts."""
    return LengthBuckets((), (value,))
