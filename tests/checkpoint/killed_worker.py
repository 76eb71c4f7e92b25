"""`python -m hybridflow.train` one of whose ranks does something at its n-th call of a function.

torchrun ... -m tests.checkpoint.killed_worker RANK MODULE:FUNCTION N WHAT CONFIG [section.key=value ...]

WHAT: a number: the rank is killed so many seconds later, by another thread. A pattern and a number: it is killed once
there are so many such files. `told`: it is told to end, as by SIGUSR1. `nothing`: the function does nothing, in every
call. A rank that is killed prints `below PID ...` first, all processes that it has started.
N = 0: nobody is killed. RANK may be 1+: then the rank is killed anew each time that torchrun has started it again.
"""

import glob
import importlib
import os
import signal
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from hybridflow.cli.train import main
from hybridflow.parallel.child_processes import children
from hybridflow.parallel.stop import StopRequest


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


def kill(pattern: str, number: float) -> None:
    if pattern:
        while len(glob.glob(pattern)) < number:
            time.sleep(0.01)
    else:
        time.sleep(number)
    os.write(1, f"below {' '.join(map(str, descendants(os.getpid())))}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def act(what: str, stops: list[StopRequest]) -> None:
    if what == "told":
        stops[-1].ask("SIGUSR1")
    elif what == "0":
        kill("", 0)
    else:
        *pattern, number = what.split(" ")
        threading.Thread(target=kill, args=("".join(pattern), float(number))).start()


def acts_at(place: str, number: int, what: str) -> None:
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    holder: Any = importlib.import_module(module)
    for part in outer:
        found = getattr(holder, part)
        if isinstance(found, ModuleType):  # whose functions others call, too
            found = SimpleNamespace(**vars(found))
            setattr(holder, part, found)
        holder = found
    function, calls, stops, listen = getattr(holder, name), [0], list[StopRequest](), StopRequest.listen

    def counted(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and what != "nothing":
            act(what, stops)
        return None if what == "nothing" else function(*arguments, **named)

    def listening(stop: StopRequest) -> None:
        stops.append(stop)
        listen(stop)

    StopRequest.listen = listening  # type: ignore[method-assign]
    setattr(holder, name, counted)


if __name__ == "__main__":
    rank, place, number, what, *rest = sys.argv[1:]
    again = rank.endswith("+") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if int(number) and again and os.environ["RANK"] == rank.rstrip("+"):
        acts_at(place, int(number), what)
    main(rest)
