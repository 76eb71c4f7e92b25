"""Reward functions that do what users' do, as tests.rewards.misbehaving:NAME; the column `how` says which of it."""

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

Columns = dict[str, list[Any]]
SEEN: list[str] = []  # global state
SLEEPER = [sys.executable, "-c", "import time; time.sleep(1000)"]


def misbehaves(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """0.5 where nothing keeps it from that."""
    how = str(columns["how"][0])
    SEEN.append(how)
    WAYS[how]()
    return [0.5] * len(prompts)


def hang() -> None:
    time.sleep(1000)


def hang_with_descendants() -> None:
    """In sessions of their own, and orphans."""
    subprocess.Popen(SLEEPER, start_new_session=True)
    if os.fork() == 0:
        subprocess.Popen(SLEEPER, start_new_session=True)
        os._exit(0)
    time.sleep(1000)


def deaf_hang() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def late_alarm() -> None:
    signal.alarm(1)  # would end the process at the next row


def own_alarm() -> None:
    """As libraries that limit themselves do."""

    def rings(number: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(1000)
    except TimeoutError:
        return


def prints() -> None:
    print("printed by a function")
    os.write(2, b"written by a function\n")
    sys.stdout = open(os.devnull, "w")


def prints_without_end() -> None:
    while True:
        print("x" * 1000)


def fork_bomb() -> None:
    while True:
        os.fork()


def allocates() -> None:
    """More than 2 GB, all of it used."""
    len(bytearray(3 << 30))


def allocates_in_children() -> None:
    """No process too much, all together."""
    for _ in range(4):
        if os.fork() == 0:
            used = b"x" * (150 << 20)
            time.sleep(1000 + len(used))
    time.sleep(1000)


def recursion() -> None:
    recursion()


def returns_twice() -> None:
    """A child goes on as well."""
    os.fork()


def global_state() -> None:
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    random.seed = None  # type: ignore[assignment]
    del random.seed
    raise SystemExit("out of here")


def dies_in_a_thread() -> None:
    threading.Thread(target=os._exit, args=[5]).start()
    time.sleep(1000)


def closes_all() -> None:
    os.closerange(0, 1000)


def segfault() -> None:
    ctypes.string_at(0)


WAYS = {
    "well": lambda: None,
    "hang": hang,
    "hang with descendants": hang_with_descendants,
    "deaf hang": deaf_hang,
    "late alarm": late_alarm,
    "own alarm": own_alarm,
    "prints": prints,
    "prints without end": prints_without_end,
    "fork bomb": fork_bomb,
    "allocates": allocates,
    "allocates in children": allocates_in_children,
    "recursion": recursion,
    "returns twice": returns_twice,
    "global state": global_state,
    "os._exit": lambda: os._exit(3),
    "dies in a thread": dies_in_a_thread,
    "closes all": closes_all,
    "segfault": segfault,
    "raises": lambda: {}["no such key"],
}


def right(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """Of held-out responses: all are, as far as it gets there."""
    WAYS[str(columns["how"][0])]()
    return [1.0] * len(prompts)


async def waits(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """An `async def`: 0.25 after a moment; some hang, one of them in the way of all others."""
    how = columns["how"][0]
    if how in ("hang", "deaf hang"):
        (time.sleep if how == "deaf hang" else await_nothing)(1000)
        await asyncio.sleep(1000)
    if how == "os._exit":
        os._exit(4)
    await asyncio.sleep(0.1)
    return [0.25]


def await_nothing(seconds: float) -> None:
    """Leaves the wait to the event loop."""


def length_parts(prompts: list[str], responses: list[str], columns: Columns, *, most: int) -> list[dict[str, float]]:
    """Of all responses to a prompt."""
    assert len(set(prompts)) == 1
    return [{"of_most": len(response) / most, "rank": float(i)} for i, response in enumerate(responses)]


def numbers(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """What should be the same whichever process is asked: an order of a set, and random numbers."""
    order = list({f"letter {letter}" for letter in "abcdefghij"}).index("letter a")
    return [order + random.random()] * len(prompts)


def who(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """The process; and whether torch is in it (negative)."""
    time.sleep(0.05)
    return [float(-os.getpid() if "torch" in sys.modules else os.getpid())] * len(prompts)


def begun(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """Says so in the directory of the column, and goes on for ever."""
    Path(str(columns["directory"][0]), f"begun {os.getpid()}").touch()
    hang_with_descendants()
    return []


def waits_in_all(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    """As long as the first response says, however many signals come."""
    until = time.monotonic() + float(responses[0])
    while time.monotonic() < until:
        time.sleep(0.01)
    return [1.0] * len(responses)


def echoes_length(prompts: list[str], responses: list[str], columns: Columns) -> list[float]:
    return [float(len(response)) for response in responses]
