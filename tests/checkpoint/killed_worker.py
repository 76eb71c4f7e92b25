"""`python -m hybridflow.train` that one of its ranks does not survive: it is killed at its n-th call of a function.

torchrun ... -m tests.checkpoint.killed_worker RANK MODULE:FUNCTION N SECONDS CONFIG [section.key=value ...]

SECONDS: from the call to the kill, which another thread does. N = 0: nobody is killed. RANK may be 1+: then the rank is
killed anew each time that torchrun has started it again.
"""

import importlib
import os
import signal
import sys
import threading
from typing import Any

from hybridflow.cli.train import main


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(place: str, number: int, seconds: float) -> None:
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    holder: Any = importlib.import_module(module)
    for part in outer:
        holder = getattr(holder, part)
    function, calls = getattr(holder, name), [0]

    def counted(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            if seconds:
                threading.Timer(seconds, kill).start()
            else:
                kill()
        return function(*arguments, **named)

    setattr(holder, name, counted)


if __name__ == "__main__":
    rank, place, number, seconds, *rest = sys.argv[1:]
    again = rank.endswith("+") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if int(number) and again and os.environ["RANK"] == rank.rstrip("+"):
        killed_at(place, int(number), float(seconds))
    main(rest)
