"""How a process ends from any thread: says what it has to say, and is gone, whatever the main thread is in.

A terminal or a pipe that nobody reads blocks who writes to it, and the main thread may hold the lock of a stream for
ever. So what is said is given a few seconds, in a thread that nobody waits for any longer.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

PATIENCE = 3.0  # seconds
NAME = "hybridflow last words"  # of threads
STDERR = 2


def in_time(act: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Run `act` in a thread; whether `act` has ended after `seconds`. Else the thread goes on."""
    thread = threading.Thread(target=act, name=NAME, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def still_busy() -> bool:
    """Whether anything is still under way that was not over in time: the process had better `leave`."""
    return any(thread.name == NAME for thread in threading.enumerate())


def say(text: str) -> None:
    """On stderr, at once and in one piece; and into the log of this rank."""
    in_time(lambda: _write(f"{text.rstrip()}\n".encode()))
    in_time(lambda: logging.getLogger("hybridflow").error("%s", text.rstrip(), extra={"shown": True}))


def leave(status: int) -> NoReturn:
    """End the process at once: other ranks may be inside a collective, and engine threads would wait for them."""
    in_time(_flush)
    in_time(logging.shutdown)
    os._exit(status)


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        while text:
            text = text[os.write(STDERR, text) :]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
