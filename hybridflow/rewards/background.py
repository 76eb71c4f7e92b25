"""Calls of users' functions in a thread of this rank, one for each prompt's responses, while others are generated.

    calls = BackgroundCalls(call)
    calls.submit(group)             # as soon as all responses to a prompt are there
    begun = calls.close()           # no further call begins: the rest is for all ranks
    calls.results()                 # waits for the one that runs, raises what it raised

What is called together is fixed, a prompt's responses: a function that looks at its whole list sees the same list
whenever it is called, and by which rank.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybridflow.errors import RewardError

GroupScores = tuple[list[float], ...]  # of each function, one number a row


@dataclass(frozen=True)
class Group:
    """The responses to one prompt of an iteration: rows of the rollout, and their tokens."""

    prompt: int
    rows: tuple[int, ...]
    responses: tuple[list[int], ...]


class BackgroundCalls:
    """Of one iteration. Calls come one after the other, in the order of `submit`.

    needs_main_thread: a function has refused to run in another: what was begun and has no result is the caller's.
    """

    def __init__(self, call: Callable[[Group], GroupScores]) -> None:
        self._call = call
        self._waiting: deque[Group] = deque()
        self._begun: list[int] = []
        self._known: dict[int, GroupScores] = {}
        self._error: BaseException | None = None
        self.needs_main_thread = False
        self._changed, self._closed = threading.Condition(), False
        self._thread: threading.Thread | None = None

    def submit(self, group: Group) -> None:
        with self._changed:
            self._waiting.append(group)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hybridflow reward functions", daemon=True)
            self._thread.start()

    def close(self) -> tuple[int, ...]:
        """The prompts whose calls have begun; no other will."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            return tuple(self._begun)

    def wait(self) -> None:
        """Until no call runs, and none will."""
        self.close()
        if self._thread is not None:
            self._thread.join()

    def results(self) -> Mapping[int, GroupScores]:
        """By prompt. Errors: what a call raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._known

    def _run(self) -> None:
        while (group := self._next()) is not None:
            try:
                self._known[group.prompt] = self._call(group)
            except BaseException as error:  # the main thread raises it: here nobody would hear of it
                self.needs_main_thread = _names_threads(error)
                self._error = None if self.needs_main_thread else error
                self.close()

    def _next(self) -> Group | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            group = self._waiting.popleft()
            self._begun.append(group.prompt)
            return group


def _names_threads(error: BaseException) -> bool:
    """Whether a function cannot run beside the main thread: signals, event loops and SQLite say so in these words."""
    return isinstance(error, RewardError) and error.__cause__ is not None and "thread" in str(error.__cause__)
