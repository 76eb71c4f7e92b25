"""What is counted of turns that environments answer."""

from dataclasses import dataclass


@dataclass
class TurnCounts:
    """Of this rank since somebody emptied them. seconds: that rows have waited, together; cached: prefix tokens.

    dropped: turns whose answer nobody got.
    """

    turns: int = 0
    dropped: int = 0
    tool_calls: int = 0
    failed_calls: int = 0
    seconds: float = 0.0
    prefix_tokens: int = 0
    cached_tokens: int = 0

    def clear(self) -> None:
        for name in self.names():
            setattr(self, name, 0)

    def names(self) -> list[str]:
        return list(vars(self))

    def values(self) -> list[float]:
        """In the order of the names."""
        return list(vars(self).values())
