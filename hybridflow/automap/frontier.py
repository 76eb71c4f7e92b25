"""The least seconds that several roles can take together on a rank, by the bytes that they may hold there. Pure.

Of each role one option is taken. A frontier has, in the order of their bytes, the sums that no other sum beats in both;
of a request with so many bytes left the last that they hold is the answer.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from hybridflow.automap.rank_classes import Float, Int

MOST_POINTS = 256


@dataclass(frozen=True)
class Frontier:
    """bytes ascend, seconds descend."""

    bytes: Int
    seconds: Float

    @classmethod
    def nothing(cls) -> Self:
        """Of no role."""
        return cls(np.zeros(1, dtype=np.int64), np.zeros(1))

    @classmethod
    def from_points(cls, held: Int, seconds: Float) -> Self:
        """Of one role's options, or of sums; with more points than `MOST_POINTS` some stand for several: the least
        bytes and the least seconds of these."""
        order = np.lexsort((seconds, held))
        held, seconds = held[order], seconds[order]
        better = np.concatenate(([True], seconds[1:] < np.minimum.accumulate(seconds)[:-1]))
        held, seconds = held[better], seconds[better]
        if len(held) > MOST_POINTS:
            first = np.linspace(0, len(held), MOST_POINTS, endpoint=False).astype(np.int64)
            last = np.append(first[1:], len(held)) - 1
            held, seconds = held[first], seconds[last]
        return cls(held, seconds)

    def plus(self, held: Int, seconds: Float) -> "Frontier":
        """With one more role, of whose options these are the bytes and the seconds."""
        own = Frontier.from_points(held, seconds)
        sums = np.add.outer(self.bytes, own.bytes), np.add.outer(self.seconds, own.seconds)
        return Frontier.from_points(sums[0].ravel(), sums[1].ravel())

    def within(self, room: Int) -> Float:
        """The least seconds for each number of bytes; infinite where not even the least goes in."""
        at = np.searchsorted(self.bytes, room, side="right") - 1
        return np.where(at >= 0, self.seconds[at], np.inf)
