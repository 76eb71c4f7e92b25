"""Short notes that the ranks of one start leave for each other in torch's store, where some no longer do their part.

The store is that of torchrun's agent, or rank 0's. The store's host may be gone, and the store's client waits on a
socket without end: so a separate thread asks, and who does not get an answer in time goes on without. No method
raises or blocks for longer than `ANSWER_SECONDS`; None says that the store does not answer, and the question may have
been dropped. `deliver` writes what must not be lost: that thread tries again until the store has taken it.

The connection is separate (`clone`): a client has a lock, and the main thread must never wait for this thread.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError, DistNetworkError

ANSWER_SECONDS = 5.0
RETRY_SECONDS = 0.5  # between two tries to deliver a note

T = TypeVar("T")


class StoreClient:
    """Keys lie under `prefix`, which no other start has: torchrun's store outlives a restart."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = PrefixStore(f"hybridflow/{prefix}", store.clone())  # type: ignore[attr-defined]  # torch has it, the stub not
        self._store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self._questions: queue.SimpleQueue[Callable[[], None] | None] = (
            queue.SimpleQueue()
        )  # None: look what to deliver
        self._undelivered: dict[str, str] = {}
        self._delivery = threading.Lock()  # of that dictionary
        self._one_at_a_time = threading.Lock()
        self._answered = threading.Event()
        self._answered.set()
        self._closed = False
        threading.Thread(target=self._ask, name="hybridflow store client", daemon=True).start()

    def post(self, key: str, text: str = "") -> bool:
        """Write a note; whether the store has taken the note in time."""

        def set_it() -> bool:
            self._store.set(key, text)
            return True

        return self._answer(set_it) or False

    def deliver(self, key: str, text: str) -> None:
        """Write a note, again and again until the store takes it, or a newer one of this key. Returns at once.

        Nobody else may write this key: the last text that is given stands in the end.
        """
        with self._delivery:
            self._undelivered[key] = text
        self._questions.put(None)

    def read_all(self, keys: Sequence[str]) -> list[str] | None:
        """Notes by key, in two requests; None where one of them has never been written, too."""

        def read() -> list[str] | None:
            there = self._store.check(list(keys))
            return [text.decode() for text in self._store.multi_get(list(keys))] if there else None

        return self._answer(read)

    def read(self, key: str) -> str | None:
        """None where there is no such note, too."""
        return self._answer(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def has(self, key: str) -> bool | None:
        return self._answer(lambda: self._store.check([key]))

    def add(self, key: str, amount: int = 1) -> int | None:
        """The new count; with 0, the count."""
        return self._answer(lambda: self._store.add(key, amount))

    def swap(self, key: str, before: str, after: str) -> str | None:
        """The note as it is then: `after` if it was `before`, or if there was none and `before` is empty."""
        return self._answer(lambda: self._store.compare_set(key, before, after).decode())

    def close(self) -> None:
        """Nothing is asked from now on: Python does not end well while a thread is inside torch."""
        with self._one_at_a_time:
            self._closed = True

    def _answer(self, question: Callable[[], T]) -> T | None:
        with self._one_at_a_time:
            if self._closed or not self._answered.is_set():  # it still waits for the answer before
                return None
            found: list[T] = []
            self._answered.clear()
            self._questions.put(lambda: found.append(question()))
            self._answered.wait(ANSWER_SECONDS)
            return found[0] if found else None

    def _ask(self) -> None:
        while True:
            try:
                question = self._questions.get(timeout=RETRY_SECONDS if self._undelivered else None)
            except queue.Empty:
                question = None
            if question is not None:
                self._try(question)
                self._answered.set()
            for key, text in self._still_to_deliver():
                self._try(partial(self._write, key, text))

    def _try(self, question: Callable[[], None]) -> None:
        if self._closed:
            return
        try:
            question()
        except DistNetworkError:  # for good; torch would warn of each further question, with another stack
            self._closed = True
        except DistError:  # no answer in time; that nothing is found says so
            pass

    def _still_to_deliver(self) -> list[tuple[str, str]]:
        with self._delivery:
            if self._closed:
                self._undelivered.clear()
            return list(self._undelivered.items())

    def _write(self, key: str, text: str) -> None:
        self._store.set(key, text)
        with self._delivery:
            if self._undelivered.get(key) == text:
                del self._undelivered[key]
