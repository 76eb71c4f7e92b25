"""Ranks that exchange a few numbers for ever, or until something befalls them. What each test does, by name.

    torchrun --nproc-per-node 3 -m tests.parallel.faults_worker DIRECTORY CASE

A rank writes its pid to DIRECTORY/RANK once it has watched others for a while.
"""

import ctypes
import faulthandler
import os
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.errors import ConfigError, ExitStatus
from hybridflow.parallel import watchdog as watchdogs
from hybridflow.parallel.collectives import Collectives
from hybridflow.parallel.peer_processes import Condition, Peer, condition, this_process
from hybridflow.parallel.platform import join_world
from hybridflow.parallel.process_exit import leave
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.watchdog import Watchdog

DEADLINE, GRACE, HOST_SILENCE = 3.0, 1.5, 3.0  # seconds
PAUSE = 0.01  # seconds between two steps
VICTIM = 1
LATE = 2  # with "grace": this rank's grace has not ended when the others' has
STEPS_BEFORE = 5


def run(case: str, directory: Path) -> None:
    rank = int(os.environ["RANK"])
    faulthandler.enable()
    Collectives.install()
    hosts = case.startswith("hosts")
    if hosts:
        watchdogs.this_process = on_a_host_of_its_own
    if case.endswith("unseen"):
        watchdogs.condition = without_exit_code
    stop = StopRequest(GRACE if case.startswith("grace") and rank != LATE else 300)
    join_world("gloo", timedelta(seconds=60))
    hold = {"hold_seconds": 1.0} if hosts else {}  # there is no torchrun to wait for
    watchdog = Watchdog({"update": DEADLINE, "rollout": 600}, stop, host_silence_seconds=HOST_SILENCE, **hold)
    watchdog.start(dist.group.WORLD, directory / "logs")
    try:
        status = work(case, rank, watchdog, directory)
    except Exception as error:
        watchdog.note_failure(error)
        traceback.print_exception(error)
        leave(1)
    watchdog.close()
    time.sleep(0.5 * rank)  # torchrun signals the others when one has ended with an error
    leave(status)


def work(case: str, rank: int, watchdog: Watchdog, directory: Path) -> ExitStatus:
    numbers = torch.full((4,), 1.0)
    pair = dist.new_group([0, 2])
    for step in range(int(1.3 * DEADLINE / PAUSE) if case == "healthy" else 1_000_000):
        watchdog.enter("rollout" if case.startswith("hosts") else "update")
        numbers.fill_(1.0)
        if rank != VICTIM and case != "computing":
            dist.broadcast(numbers, 0, group=pair)
        if step == STEPS_BEFORE:
            befall(case, rank)
            (directory / f"{rank}.new").write_text(str(os.getpid()))
            (directory / f"{rank}.new").rename(directory / str(rank))
        if case == "computing" or (case == "hosts" and step > STEPS_BEFORE):
            watchdog.enter("rollout")
            computes_without_others()
        dist.all_reduce(numbers)
        assert numbers.tolist() == [dist.get_world_size()] * 4
        if case == "agreed" and watchdog.stop.agreed(dist.group.WORLD):
            (directory / f"agreed_{rank}").write_text(f"{step} {watchdog.stop.requested}")
            return ExitStatus.STOPPED
        if case == "agreed also" and watchdog.stop.agreed(dist.group.WORLD, also=rank == 2 and step == 7):
            (directory / f"agreed_{rank}").write_text(f"{step} {watchdog.stop.requested}")
            return ExitStatus.STOPPED
        time.sleep(PAUSE)
    return ExitStatus.FINISHED


def befall(case: str, rank: int) -> None:
    if case == "recv" and rank == 2:
        dist.recv(torch.empty(3), src=VICTIM)
    if rank != VICTIM:
        return
    match case:
        case "loop":
            loops_here()
        case "recv":
            sleeps_here()
        case "native":
            ctypes.PyDLL(None).sleep(600)  # with Python's lock
        case "segfault":
            crashes_here()
        case "error" | "hosts, error":
            raise ConfigError("a mistake of the user's")


def loops_here() -> None:
    while True:
        pass


def sleeps_here() -> None:
    time.sleep(600)


def crashes_here() -> None:
    ctypes.string_at(0)


def computes_without_others() -> None:
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        torch.ones(100, 100) @ torch.ones(100, 100)


def on_a_host_of_its_own(rank: int) -> Peer:
    return replace(this_process(rank), host=f"host{rank}", machine=f"machine{rank}")


def without_exit_code(peer: Peer) -> Condition:
    """As where torchrun has always asked first."""
    seen = condition(peer)
    return Condition(None) if seen.ended else seen


def serve_store(port: Connection) -> None:
    """As torchrun's agent does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    port.send(store.port)
    time.sleep(600)


def fork(environment: dict[str, str], case: str, directory: Path) -> None:
    """As a process of multiprocessing: what it prints goes to DIRECTORY/output."""
    os.environ.update(environment)
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    run(case, directory)


if __name__ == "__main__":
    run(sys.argv[2], Path(sys.argv[1]))
