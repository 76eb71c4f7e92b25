"""DeepEP's events."""

from collections.abc import Callable


class EventHandle:
    """Of what is launched so far."""


class EventOverlap:
    def __init__(self, event: EventHandle | None = None) -> None:
        self.at_wait: list[Callable[[], object]] = []

    def current_stream_wait(self) -> None:
        for arrive in self.at_wait:
            arrive()
        self.at_wait.clear()
