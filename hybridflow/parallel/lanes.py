"""Work that a device does beside other work: copies from the host, computing, copies to the host."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch

Lane = Literal["in", "compute", "out"]


class Lanes:
    """Three queues, each in its order. These are of a CPU, which does all at once."""

    def run(self, lane: Lane, work: Callable[[], object] | None = None, *, after: Iterable[Any] = ()) -> Any:
        """Queue the work. after: what earlier calls have returned, of work that must be done before."""
        if work is not None:
            work()


class Streams(Lanes):
    """Those of a CUDA device; `compute` is the current stream."""

    def __init__(self) -> None:
        self._streams: dict[Lane, torch.cuda.Stream] = {"in": torch.cuda.Stream(), "out": torch.cuda.Stream()}

    def run(self, lane: Lane, work: Callable[[], object] | None = None, *, after: Iterable[Any] = ()) -> Any:
        """See `Lanes`."""
        stream = self._streams.get(lane) or torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event)
            super().run(lane, work)
            return stream.record_event()


def in_two_slots(
    lanes: Lanes,
    count: int,
    fetch: Callable[[int], object],
    step: Callable[[int], object],
    put_away: Callable[[int], object],
) -> None:
    """Parts 0 .. count - 1, of which two are on the device at a time: part i lies in slot i % 2.

    A part comes while another one goes. Afterwards the computing lane has waited for all of them.
    """
    begun, there, gone = lanes.run("compute"), [], []
    for number in range(min(2, count)):
        there.append(lanes.run("in", partial(fetch, number), after=[begun]))
    for number in range(count):
        done = lanes.run("compute", partial(step, number), after=[there[number]])
        gone.append(lanes.run("out", partial(put_away, number), after=[done]))
        if number + 2 < count:
            there.append(lanes.run("in", partial(fetch, number + 2), after=[gone[number]]))
    lanes.run("compute", after=gone)
