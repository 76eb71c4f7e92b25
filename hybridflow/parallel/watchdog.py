"""One thread a rank that ends the run when a rank is stuck or gone, so that no rank waits for it in vain.

    watchdog = Watchdog(deadlines, stop)          # the process's
    watchdog.start(world_group(), run_dir / "logs")
    watchdog.enter("update")                      # at each change of phase: the phase's deadline starts anew

Stuck: a rank is longer in a phase than the phase's deadline. It raises an alarm in the store, all ranks say there what
they are doing, one of them reports (`hybridflow.parallel.hang_report`) and all exit with HANG; those that say nothing
are killed by the others of their host.

Gone: a rank has ended, and neither has it said why (`failed`) nor left in peace (`close`). Who sees it says on which
host, and by which signal; all others end with ERROR. They stay until torchrun has seen it too, for torchrun's summary
names the rank that it sees end first. A host with no rank left is gone when it has been silent for `HOST_SILENCE`.

Everything that ends a rank because of another is done by this thread alone.
"""

import atexit
import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

from hybridflow.errors import ExitStatus
from hybridflow.parallel.collectives import Collectives
from hybridflow.parallel.diagnosis import describe_state, dump_nccl_trace, lost_peer, python_stacks
from hybridflow.parallel.hang_report import Statement, report, report_alone
from hybridflow.parallel.peer_processes import (
    Condition,
    Wake,
    condition,
    gather_peers,
    kill,
    out_of_memory_kills,
    this_process,
)
from hybridflow.parallel.process_exit import in_time, leave, say
from hybridflow.parallel.ranks import shown
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.store_client import ANSWER_SECONDS, StoreClient

POLL_SECONDS = 1.0
RANKS_PER_SECOND = 1000  # that ask the store: with more ranks each asks less often
COLLECT_SECONDS = 3.0  # for the ranks' statements, and two polls more
BEAT_SECONDS = 10.0
HOST_SILENCE = 45.0
HOLD_SECONDS = 10.0  # that a rank stays for torchrun to see first who ended first
REPORT = "hang_report.txt"
PEACEFUL = "left"  # notes, each with a rank: it ended as it should, ...
FAILED = "failed"  # ... or has itself said why, ...
UNSAVED = "unsaved"  # ... or was asked to end and did, without a checkpoint


class Watchdog:
    """Of this rank. `deadlines`: seconds by phase. Before `start`, and in a world of one, there is nobody else."""

    def __init__(
        self,
        deadlines: Mapping[str, float],
        stop: StopRequest,
        *,
        host_silence_seconds: float = HOST_SILENCE,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        self._deadlines, self.stop = dict(deadlines), stop
        self._host_silence, self._hold_seconds = host_silence_seconds, hold_seconds
        self._entered: tuple[str, float, float] | None = None  # phase, time.monotonic, and _paused then
        self._paused = 0.0
        self._closed = threading.Event()
        self._ending = threading.Event()
        self._board: StoreClient | None = None

    # ---- what the main thread calls

    def start(self, group: dist.ProcessGroup, directory: Path) -> None:
        """Begin to watch. Collective over the group, that of the world. directory: for reports, made when needed."""
        self._collectives, self._directory = Collectives.install(), directory
        own = this_process(group.rank())
        self._peers, nonce = gather_peers(own, secrets.token_hex(8), group)
        self._own = self._peers[own.rank]
        self._names = [str(peer) for peer in self._peers]
        self._near = {peer.rank: peer for peer in self._peers if peer.machine == own.machine and peer.pid != own.pid}
        self._machines = list(dict.fromkeys(peer.machine for peer in self._peers))
        self._board = StoreClient(dist.distributed_c10d._get_default_store(), nonce)
        self._wake = Wake(self._near.values())
        self._oom_kills = out_of_memory_kills()
        self._interval = max(POLL_SECONDS, len(self._peers) / RANKS_PER_SECOND)
        self._looked = self._next_beat = self._heard = time.monotonic()
        self._last_beat: str | None = None
        atexit.register(self._at_exit)
        self.stop.announce = lambda: self._notices.post(f"{UNSAVED}/{own.rank}")
        self.stop.listen()
        threading.Thread(target=self._watch, name="hybridflow watchdog", daemon=True).start()

    def enter(self, phase: str) -> None:
        """The main thread begins something that has a separate deadline."""
        assert phase in self._deadlines, f"{phase!r} is no phase: {', '.join(self._deadlines)}"
        self._entered = (phase, time.monotonic(), self._paused)

    def rest(self) -> None:
        """Until the next `enter` no deadline runs."""
        self._entered = None

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """The block is this phase; after it the one before begins anew, if there was one."""
        before = self._entered
        self.enter(phase)
        try:
            yield
        finally:
            self.rest()
            if before is not None:
                self.enter(before[0])

    def close(self) -> None:
        """This rank ends as it should. From now on nothing changes the exit status: neither a signal nor a peer."""
        self._end_watch(PEACEFUL)

    def note_failure(self, error: BaseException) -> None:
        """This rank ends with an error that it reports itself; comes before it does.

        Where the error may come from a rank that is gone, it waits for the thread to find that out, and then it does
        not return: the victim of a death is not who should speak.
        """
        if self._board is None or self._closed.is_set():
            return
        if lost_peer(error):
            self._ending.wait(ANSWER_SECONDS + (self._hold_seconds if len(self._machines) == 1 else self._host_silence))
        if self._ending.is_set():  # by the thread, which ends this process
            time.sleep(self._hold_seconds + 10 * ANSWER_SECONDS)
        self._end_watch(FAILED)

    # ---- the thread

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._wake.sleep(self._interval)
            self._count_pause()
            self._look()
        self._wake.close()

    def _look(self) -> None:
        """Once: is a rank gone, or stuck, or does another say so?"""
        gone = self._gone()
        if gone is not None and not self._closed.is_set():
            self._end_without(*gone)
        alarm = self._notices.read("alarm")
        if alarm not in (None, "hang") and not self._closed.is_set():
            self._end_silently()
        if (alarm == "hang" or self._overdue()) and not self._closed.is_set():
            self._end_hung()
        self._beat()

    @property
    def _notices(self) -> StoreClient:
        assert self._board is not None, "the watchdog has not started"
        return self._board

    def _end_watch(self, note: str) -> None:
        self.stop.disarm()
        if self._board is None or self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self._at_exit)
        self._board.post(f"{note}/{self._own.rank}")
        if note == FAILED:
            self._alarm_of_an_end()
        self._board.close()

    def _at_exit(self) -> None:
        """Python has printed the error that ends this process, if one does."""
        self._end_watch(FAILED if hasattr(sys, "last_value") else PEACEFUL)

    def _count_pause(self) -> None:
        """While this process was stopped as a whole, with the run or the machine, no deadline ran."""
        now = time.monotonic()
        usual = self._interval + 4 * ANSWER_SECONDS  # of one round
        pause = max(0.0, now - self._looked - usual)
        self._paused += pause
        self._heard += pause
        self._looked = now

    def _phase(self) -> tuple[str, float]:
        """The phase and the seconds in it."""
        entered = self._entered
        if entered is None:
            return "none", 0.0
        phase, since, paused = entered
        return phase, time.monotonic() - since - (self._paused - paused)

    def _overdue(self) -> bool:
        phase, seconds = self._phase()
        return seconds > self._deadlines.get(phase, float("inf"))

    # ---- a rank is gone

    def _gone(self) -> tuple[str, bool] | None:
        """Why this rank has to end, and whether that is reported already: a rank or a whole host is gone."""
        for rank, peer in list(self._near.items()):
            seen = condition(peer)
            if not seen.ended:
                continue
            if seen.exit_code == 0 or self._notices.has(f"{PEACEFUL}/{rank}"):
                del self._near[rank]
            elif seen.exit_code == ExitStatus.HANG:  # it was quick: the alarm says the rest
                continue
            elif seen.exit_code == ExitStatus.NOT_SAVED or self._notices.has(f"{UNSAVED}/{rank}"):
                # It has said so, for a reason that this rank hears next. torchrun may have asked for the exit
                # code before this rank looked: then only the note is left.
                leave(ExitStatus.NOT_SAVED)
            else:
                reported = self._notices.has(f"{FAILED}/{rank}")
                if reported is None:  # the store may have ended with it, in peace, and this rank be about to
                    self._hold()
                return f"{peer} ended without a word: {self._cause(seen)}", bool(reported)
        return self._silent_host()

    def _cause(self, seen: Condition) -> str:
        before, now = self._oom_kills, out_of_memory_kills()
        if before is None or now is None or now <= before:
            return seen.cause
        return f"{seen.cause}; the kernel has killed {now - before} of this host's processes for memory meanwhile"

    def _silent_host(self) -> tuple[str, bool] | None:
        """The next host, in a ring, when no rank there has written for too long; another host watches this one."""
        if len(self._machines) == 1 or time.monotonic() - self._heard < self._host_silence:
            return None
        machine = self._next_machine()
        ranks = [peer.rank for peer in self._peers if peer.machine == machine]
        if all(self._notices.has(f"{PEACEFUL}/{rank}") for rank in ranks):
            self._heard = float("inf")
            return None
        reported = any(self._notices.has(f"{FAILED}/{rank}") for rank in ranks)
        host = self._peers[ranks[0]].host
        return f"host {host}, ranks {shown(ranks)}, has been silent for {self._host_silence:g} s", reported

    def _next_machine(self) -> str:
        return self._machines[(self._machines.index(self._own.machine) + 1) % len(self._machines)]

    def _beat(self) -> None:
        """Tell that this host is there, and look at the next one. Only where there are several."""
        if len(self._machines) == 1 or time.monotonic() < self._next_beat:
            return
        now = time.monotonic()
        self._next_beat = now + min(BEAT_SECONDS, self._host_silence / 4)
        own = self._machines.index(self._own.machine)
        answers = self._notices.post(f"beat/{own}", f"{self._own.rank} {now}")
        beat = self._notices.read(f"beat/{self._machines.index(self._next_machine())}")
        if not answers or beat != self._last_beat:  # a store that does not answer says nothing of the host
            self._last_beat, self._heard = beat, now

    def _end_without(self, what: str, reported: bool) -> None:
        """End since a rank is gone. The first to see it speaks, unless the rank itself has."""
        self._begin_to_end()
        if not reported and self._notices.add("deaths") in (1, None):
            phase, _ = self._phase()
            say(f"hybridflow: {what} (rank {self._own.rank} was in phase {phase}); the other ranks end")
        self._alarm_of_an_end()
        self._end_silently()

    def _alarm_of_an_end(self) -> None:
        """All others end too. With this rank torchrun ends here, which may have the store that other hosts look at."""
        self._notices.post("alarm", "death")
        if len(self._machines) > 1:
            time.sleep(2 * self._interval)

    def _end_silently(self) -> None:
        """Another speaks."""
        self._begin_to_end()
        self._hold()
        if not self._closed.is_set():
            leave(ExitStatus.ERROR)

    def _hold(self) -> None:
        """Wait until torchrun has noticed that a rank is gone, and signals this one, or will not any more."""
        until = time.monotonic() + self._hold_seconds
        while self.stop.requested is None and time.monotonic() < until and not self._closed.is_set():
            time.sleep(0.05)

    def _begin_to_end(self) -> None:
        self.stop.disarm()
        self._ending.set()

    # ---- a rank is stuck

    def _end_hung(self) -> None:
        """Say what this rank does; the first one reports what all say. All end."""
        self._begin_to_end()
        self._notices.post("alarm", "hang")
        statement = self._statement()
        dump_nccl_trace(self._directory, self._own.rank)
        self._notices.post(f"statement/{self._own.rank}", statement.to_json())
        self._notices.add("statements")
        match self._notices.add("reporters"):
            case None:
                silent = None
            case 1:
                silent = self._report(statement)
            case _:
                silent = self._reported()
        if silent is None:
            silent = self._mute()
            say(report_alone(statement, self._names, [rank for rank in silent if rank in statement.seen]))
            time.sleep(ANSWER_SECONDS + 2 * self._interval)  # the others find the ranks still as this one did
        for rank in silent:
            if rank in self._near:
                kill(self._near[rank])
        time.sleep(0.5)  # torchrun sees first who said nothing, and names it
        leave(ExitStatus.HANG)

    def _statement(self) -> Statement:
        phase, seconds = self._phase()
        seen = {rank: describe_state(condition(peer)) for rank, peer in self._near.items()}
        return Statement(
            rank=self._own.rank,
            who=str(self._own),
            phase=phase,
            seconds=seconds,
            deadline=self._deadlines.get(phase),
            stacks=python_stacks(),
            calls=tuple(self._collectives.last_calls()),
            seen=seen,
        )

    def _report(self, own: Statement) -> list[int]:
        """Wait for the others' statements, tell, and name the ranks that have made none."""
        until = time.monotonic() + COLLECT_SECONDS + 2 * self._interval
        while time.monotonic() < until and self._notices.add("statements", 0) != len(self._peers) - len(self._mute()):
            time.sleep(0.1)
        found = {peer.rank: self._notices.read(f"statement/{peer.rank}") for peer in self._peers}
        statements = {rank: Statement.from_json(text) for rank, text in found.items() if text is not None}
        text = report(statements | {own.rank: own}, self._names)
        say(text)
        in_time(lambda: self._keep(text))
        silent = [rank for rank, said in found.items() if said is None and rank != own.rank]
        self._notices.post("reported", " ".join(map(str, silent)))
        return silent

    def _mute(self) -> list[int]:
        """Ranks of this machine that cannot say anything: stopped or dead."""
        found = {rank: condition(peer) for rank, peer in self._near.items()}
        return [rank for rank, seen in found.items() if seen.ended or seen.state == "T"]

    def _reported(self) -> list[int] | None:
        """The ranks that have said nothing, when the report is out; None where none comes."""
        until = time.monotonic() + 2 * (COLLECT_SECONDS + 2 * self._interval) + 2 * ANSWER_SECONDS
        while time.monotonic() < until:
            silent = self._notices.read("reported")
            if silent is not None:
                return [int(rank) for rank in silent.split()]
            time.sleep(0.5 * self._interval)
        return None

    def _keep(self, text: str) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / REPORT).write_text(text, encoding="utf-8")
        except OSError as error:  # a full disk may be what the run hangs in
            say(f"hybridflow: {self._directory / REPORT}: cannot be written: {error}")
