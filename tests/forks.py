"""Ranks as forks of a process that has everything imported, `tests.rank_server`.

They find what torchrun's ranks find: the environment, a store that is not a rank's, an end by SIGTERM if another fails.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parent.parent
# Each process goes through a set of strings in an order of its own, but all forks of one process in one order. Code
# that takes it for the same on every rank must fail here as it does under torchrun: even and odd ranks differ.
HASH_SEEDS = ("1", "2")
PATIENCE = 30.0  # seconds between SIGTERM and SIGKILL, as torchrun has it


class Server:
    """A process to be forked. bare: it has imported nothing, for ranks that need nothing."""

    def __init__(self, hash_seed: str, *, bare: bool = False) -> None:
        settings = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": hash_seed}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.rank_server", *["bare"] * bare],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def fork(self, rank: dict[str, Any]) -> int:
        """The pid of the new rank."""
        return self._ask(rank)

    def ended(self) -> dict[int, int]:
        """Pid -> exit status of those that have ended since the last time."""
        return {int(pid): status for pid, status in self._ask({}).items()}

    def close(self) -> None:
        self._process.communicate()  # the end of its input

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"tests.rank_server has left with status {self._process.wait()}"
        return json.loads(answer)


@functools.cache
def servers() -> tuple[Server, ...]:
    """Started by the first launch, for all that follow."""
    return tuple(map(Server, HASH_SEEDS))


def run_forks(
    num_ranks: int,
    module: str,
    arguments: Sequence[str],
    *,
    seconds: float,
    restarts: int = 0,
    environment: dict[str, str] | None = None,
    of: Sequence[Server] = (),
) -> tuple[int | None, str, str]:
    """Exit status, output, errors. Status 1: a rank has failed. None: no end in time, the errors have every stack.

    restarts: how often torchrun would have restarted them. of: what is forked, by default `servers`.
    """
    of = of or servers()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    with tempfile.TemporaryDirectory() as directory:
        out, error = Path(directory, "out"), Path(directory, "error")
        files = {"module": module, "arguments": list(arguments), "out": str(out), "error": str(error)}
        running: dict[int, Server] = {}
        try:
            for rank in range(num_ranks):
                server = of[rank % len(of)]
                own = environment_of(rank, num_ranks, store.port, restarts) | (environment or {})
                pid = server.fork({"environment": own, **files})
                running[pid] = server
            status = wait_for(running, seconds)
        finally:
            end(running, signal.SIGKILL)
        return status, *(file.read_text(errors="replace") if file.exists() else "" for file in (out, error))


def environment_of(rank: int, num_ranks: int, port: int, restarts: int = 0) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    agent = {"TORCHELASTIC_RUN_ID": "forks", "TORCHELASTIC_USE_AGENT_STORE": True}
    agent["TORCHELASTIC_RESTART_COUNT"] = restarts
    own = {name: str(value) for name, value in (ranks | store | agent).items()}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **own}


def wait_for(running: dict[int, Server], seconds: float) -> int | None:
    """The status of the launch. Whoever has ended leaves `running`; when one has failed the others are told to end."""
    until = time.monotonic() + seconds
    while running and time.monotonic() < until:
        if any(reaped(running)):
            end(running, signal.SIGTERM)
            return 1
        time.sleep(0.02)
    if not running:
        return 0
    for pid in list(running):
        os.kill(pid, signal.SIGABRT)
        time.sleep(0.5)  # one after the other: they write to one file, a few letters at a time
    return None


def reaped(running: dict[int, Server]) -> list[int]:
    """The statuses of those that have ended; they leave `running`."""
    found = {pid: status for server in set(running.values()) for pid, status in server.ended().items()}
    for pid in found:
        del running[pid]
    return list(found.values())


def end(running: dict[int, Server], sign: signal.Signals) -> None:
    """Signal all, and wait until they have ended; who does not is killed."""
    until = time.monotonic() + PATIENCE
    for pid in running:
        os.kill(pid, sign)
    while running:
        reaped(running)
        if time.monotonic() > until:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
