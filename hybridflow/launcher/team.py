"""The connections to all hosts of a job: asked together, and lost one by one."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from hybridflow.launcher.connection import Connection, Events, Message, Ssh, closed, is_local
from hybridflow.launcher.hostfile import LaunchHost

PING_EVERY = 3.0  # seconds
T = TypeVar("T")


class Team:
    """A context: the end closes every connection, and then nothing is left at the other ends.

    lost_after: seconds without a sign of life after which a host is lost, and after which a host ends the host's ranks.
    """

    def __init__(
        self, hosts: Sequence[LaunchHost], python: str, ssh: Ssh, *, lost_after: float, whole_environment: bool = False
    ) -> None:
        self.events: Events = queue.Queue()
        self._lost_after = lost_after
        self.connections = [
            Connection(host, python, None if is_local(host) else ssh, self.events, whole_environment=whole_environment)
            for host in hosts
        ]
        threading.Thread(target=self._ping, daemon=True).start()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closed([connection for connection in self.connections if connection.lost is None])

    @property
    def usable(self) -> list[Connection]:
        return [connection for connection in self.connections if connection.lost is None]

    def next_events(self, seconds: float) -> Iterator[tuple[Connection, Message]]:
        """What hosts say within so long, the loss of one as {"closed": why}, once."""
        with contextlib.suppress(queue.Empty):
            connection, message = self.events.get(timeout=seconds)
            if "closed" not in message:
                yield connection, message
            elif connection.lost is None:
                connection.lost = message["closed"]
                yield connection, message
        for connection in self.usable:
            silent = time.monotonic() - connection.heard
            if silent > self._lost_after:
                connection.lost = f"no sign of life for {silent:.0f} s"
                connection.give_up()
                yield connection, {"closed": connection.lost}

    def ask(
        self, requests: Mapping[Connection, Message], answer: str, seconds: float
    ) -> tuple[dict[Connection, Any], dict[Connection, str]]:
        """What each of these hosts answers, under that key, and why others do not, in the order of the requests."""
        answers: dict[Connection, Any] = {}
        failures = {connection: connection.lost for connection in requests if connection.lost is not None}
        for connection, request in requests.items():
            connection.send(**request)
        until = time.monotonic() + seconds
        while waiting := requests.keys() - answers.keys() - failures.keys():
            for connection, message in self.next_events(0.2):
                for key, found in ((answer, answers), ("error", failures), ("closed", failures)):
                    if key in message and connection in waiting:
                        found[connection] = message[key]
            if time.monotonic() > until:
                failures |= dict.fromkeys(
                    requests.keys() - answers.keys() - failures.keys(), f"no answer in {seconds:g} s"
                )
        return _in_order(requests, answers), _in_order(requests, failures)

    def _ping(self) -> None:
        while True:
            time.sleep(PING_EVERY)
            for connection in self.usable:
                connection.send(do="alive")


def _in_order(order: Iterable[Connection], found: Mapping[Connection, T]) -> dict[Connection, T]:
    """Whichever was found first."""
    return {connection: found[connection] for connection in order if connection in found}
