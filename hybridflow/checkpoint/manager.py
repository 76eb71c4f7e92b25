"""What a run resumes from, when the run saves, and when the run ends early.

checkpoint_manager = CheckpointManager(config, digests, roles.roles_to_save(kl), ...)  # loads a checkpoint, if any
run.state = checkpoint_manager.state or run.state
...
checkpoint_manager.after_iteration(run.state, metrics, recorder, is_last=False)    # saves; raises Stopped
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hybridflow.checkpoint.change_rules import Effect
from hybridflow.checkpoint.changes import changes, content_changes, not_compared
from hybridflow.checkpoint.kept_rollout import Read, read_rollout, write_rollout
from hybridflow.checkpoint.resume import (
    check_progress,
    find_source,
    keep_best_notes,
    known_metrics,
    missing_best_metric,
    restore,
    save_notes,
)
from hybridflow.checkpoint.sharded import SavedRole
from hybridflow.checkpoint.shared_directory import check_shared, raise_together
from hybridflow.checkpoint.state import RunState, SavedRun
from hybridflow.checkpoint.store import CHECKPOINTS, step_name
from hybridflow.checkpoint.writer import CheckpointWriter
from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import RecordError, SaveError, Stopped
from hybridflow.parallel.agreement import failures, met_by_all
from hybridflow.parallel.peer_processes import parent_process
from hybridflow.parallel.platform import Platform
from hybridflow.parallel.rank_log import open_rank_log
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.recording.iteration import Metrics
from hybridflow.recording.lock import RESTART_SECONDS, RunLock
from hybridflow.recording.recorder import Recorder, record_run

Tensors = Mapping[str, Tensor]
STOPPED = "stopped"  # by which torchrun's ranks, beside the checkpoints
ROLLOUT = "rollout"  # beside the checkpoints: the responses of the iteration that is under way


class CheckpointManager:
    """Loads and saves the checkpoints of one start of a run. The constructor is collective over `group`.

    state: of the loaded checkpoint; None: the run starts anew. notes: lines for the user.
    saves: False for a replay and for a run without training. portable: a collective call; on rank 0 the result has
    the engine's experts in place of record ids.
    """

    def __init__(
        self,
        config: AnyConfig,
        digests: Mapping[str, bytes],
        roles: Sequence[SavedRole],
        *,
        platform: Platform,
        group: dist.ProcessGroup,
        store: Store,
        watchdog: Watchdog,
        restarts: int,
        saves: bool = True,
        portable: Callable[[Tensors], Tensors] = dict,
    ) -> None:
        self._config, self._platform, self._group, self._watchdog = config, platform, group, watchdog
        self._store = store
        self._stop: StopRequest = watchdog.stop
        self.digests = {name: digest.hex() for name, digest in digests.items()}
        self._saves, self._root, self._portable = saves, config.run_dir / CHECKPOINTS, portable
        self._started, self._longest_iteration, self._longest_save = time.monotonic(), 0.0, 0.0
        self._iteration_began = self._started
        self._saved_at = self._started  # time.monotonic of the last save, or of the start
        self._metrics: Mapping[str, float] = {}
        self._may_lack = True  # whether no message has said that the metric of stop_when is missing
        self._may_lack_best = config.checkpoint.keep_best > 0  # the same for the metric of keep_best
        self.notes: list[str] = []
        self.is_fork = self.may_load_rollout = False  # the second: whether this start generates what the one before did
        self.add_source_state: Callable[[RunState], RunState] = lambda state: state  # collective
        self._lock = RunLock(config.run_dir) if platform.rank == 0 else None
        raise_together(lambda: self._take_lock(restarts), group)
        self._end_again(restarts)
        if saves and config.checkpoint.saves:
            check_shared(config.run_dir, group)
        self._source = find_source(config, restarts=restarts, group=group)
        self.state = self._loaded(roles)
        raise_together(lambda: self._check_progress(restarts), group)
        self.notes += [*save_notes(config, saves=saves), *keep_best_notes(config, saves=saves)]
        self._saver = CheckpointWriter(
            roles,
            self._root,
            config.checkpoint,
            config_yaml=config.to_yaml(),
            platform=platform,
            group=group,
            store=store,
            check_lock=self._check_lock,
            digests=self.digests,
        )
        if self._source is not None and not self._source.is_fork:
            self._saver.last_iteration = self._source.saved.state.iteration

    @contextlib.contextmanager
    def recorder(self, num_iterations: int, decode: Callable[[list[int]], str]) -> Iterator[Recorder]:
        """Of the run directory, behind what is there where this start goes on with that run. Collective."""
        iteration = self.state.iteration if self.state is not None else 0
        goes_on = self._source is not None and not self._source.is_fork
        recording = record_run(
            self._config,
            num_iterations,
            rank=self._platform.rank,
            decode=decode,
            resumed=iteration if goes_on else None,
            forked=0 if goes_on else iteration,
            check_lock=self._check_lock,
        )
        try:
            with recording as recorder:
                dist.barrier(self._group)  # rank 0 has moved an earlier run aside
                open_rank_log()
                yield recorder
        finally:
            if self._lock is not None:
                self._lock.release()

    def after_iteration(self, state: RunState, metrics: Metrics, recorder: Recorder, *, is_last: bool) -> None:
        """Between two iterations: save where it is time to. Collective.

        Errors: Stopped after a request to end; SaveError; RecordError where the iteration's records could not be
        written. A RecordError comes after a save where a save is possible.
        """
        self._metrics = {name: float(value) for name, value in metrics.items()}
        now = time.monotonic()
        self._longest_iteration = max(self._longest_iteration, now - self._iteration_began)
        self._saver.report = recorder.message
        with self._watchdog.phase("save"):
            self._saver.check()
            interval = self._config.checkpoint.save_interval
            stops = self._stop.agreed(self._group, also=self._time_is_up() or recorder.failure is not None)
            unwritten = failures(recorder.failure, self._group) if stops else []
            if unwritten:
                raise RecordError(f"{'; '.join(unwritten)}; {self._saved_if_possible(state, recorder)}")
            counted = bool(interval) and state.iteration % interval == 0
            # of a run of any length: a longer num_iterations then goes on, and no start does the run again
            closes = is_last and self._config.checkpoint.saves
            if self._minutes_are_over() or stops or counted or closes:
                self._save(state, recorder)
        if stops:
            self._end(state, f"after iteration {state.iteration}")
        self._iteration_began = time.monotonic()

    def save_and_stop(self, state: RunState, recorder: Recorder, where: Stopped) -> NoReturn:
        """Save `state`, the one before the iteration that was stopped, and end. Errors: Stopped, always."""
        self._saver.report = recorder.message
        with self._watchdog.phase("save"):
            self._save(state, recorder)
        self._end(state, str(where))

    @contextlib.contextmanager
    def save_on_error(self, state: RunState, recorder: Recorder) -> Iterator[None]:
        """Where the block raises SaveError, on all ranks, save the run before it ends. Errors: SaveError."""
        try:
            yield
        except SaveError as error:
            raise SaveError(f"{error}; {self._saved_if_possible(state, recorder)}") from error

    def save_after_error(
        self,
        error: Exception,
        iteration: int,
        state: Callable[[], RunState],
        recorder: Recorder,
        metrics: Metrics | None = None,
    ) -> None:
        """Save the run, which ends with `error`, where all ranks have met an error at the same place.

        The error gets a note on what came of that, and stays the one that is reported. iteration: the last whole one,
        of which `state()` gives the state. metrics: of that one, unless `after_iteration` has had them.
        """
        if not (self._saves and iteration and met_by_all(error, iteration, self._group, self._store)):
            return
        self._saver.report = recorder.message
        try:
            with self._watchdog.phase("save"):
                if metrics is not None:
                    self._metrics = {name: float(value) for name, value in metrics.items()}
                error.add_note(self._saved_if_possible(state(), recorder))
        except Exception as other:
            error.add_note(f"the run is not saved: {type(other).__name__}: {other}")

    def finish(self) -> None:
        """Wait for a save in the background. Errors: SaveError."""
        with self._watchdog.phase("save"):
            self._saver.wait()
        self._stop.disarm()

    def should_stop(self) -> bool:
        """Whether the run ends here: any rank has a signal, or max_hours are nearly over. Collective."""
        return self._stop.agreed(self._group, also=self._time_is_up())

    def stop_reason(self, metrics: Metrics, recorder: Recorder) -> str | None:
        """Why an iteration with these metrics is the last by `stop_when`; None where it is not. Collective, if given.

        A message says once that the first row lacks the metric: the name may be wrong, or the metric comes later.
        """
        stop = self._config.stop_when
        if stop is None:
            return None
        if stop.metric in metrics:
            self._may_lack = False
            value = torch.tensor(float(metrics[stop.metric]), dtype=torch.float64)
            first = dist.get_process_group_ranks(self._group)[0]
            dist.broadcast(value, src=first, group=self._group)  # the ranks end together, come what may
            return stop.reason(float(value)) if stop.holds(float(value)) else None
        evaluated = any(name.startswith("eval/") for name in metrics)
        if metrics and self._may_lack and (evaluated or not stop.metric.startswith("eval/")):
            self._may_lack = False
            there = known_metrics(stop.metric, metrics)
            recorder.message(f"warning: stop_when.metric = {stop.metric}: this iteration has no such metric; {there}")
        return None

    def loaded_stop_reason(self) -> str | None:
        """Why training is over before it begins: the loaded checkpoint meets `stop_when`. None where it does not."""
        stop, source = self._config.stop_when, self._source
        if stop is None or source is None or source.is_fork or stop.metric not in source.saved.metrics:
            return None
        value = source.saved.metrics[stop.metric]
        return stop.reason(value) if stop.holds(value) else None

    def pop_save_seconds(self) -> float:
        """Seconds that training waited for saves since the last call, on the slowest rank; counts anew. Collective."""
        longest = torch.tensor(self._saver.seconds, dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._group)
        self._saver.seconds = 0.0
        return float(longest)

    def save_rollout(self, iteration: int, tensors: Tensors) -> None:
        """Write the responses of an iteration to disk, if checkpoint.save_rollout says so, in place of the last.

        Collective. Errors: SaveError, where checkpoint.on_error is stop; else it is reported.
        """
        if not (self._config.checkpoint.save_rollout and self._saves):
            return
        tensors, writes = self._portable(tensors), self._platform.rank == 0
        failure = write_rollout(self._root / ROLLOUT, iteration, tensors, self._group, writes=writes)
        if failure is not None:
            if self._config.checkpoint.on_error == "stop":
                raise SaveError(failure)
            self._saver.report(f"warning: {failure}")

    def load_rollout(self, iteration: int, read: Callable[[Path], Read]) -> Read | None:
        """Read the responses of an iteration that an earlier start has saved; None where there are none. Collective.

        read: reads a file; where it raises DataError, the engine generates the same responses again.
        """
        if not self.may_load_rollout or self.state is None or iteration != self.state.iteration + 1:
            return None
        return read_rollout(self._root / ROLLOUT, iteration, read, self._group)

    # ---- inside

    def _take_lock(self, restarts: int) -> None:
        if self._lock is not None:
            self._lock.take(patience=RESTART_SECONDS if restarts else 0.0)

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _end_again(self, restarts: int) -> None:
        """Errors: Stopped where the ranks of this torchrun ended on request, which torchrun took for a failure."""
        file = self._root / STOPPED
        first = self._platform.rank == 0  # whose word counts, and who removes the file
        stopped = first and restarts > 0 and file.exists()
        ended = torch.tensor(stopped and file.read_text(encoding="utf-8") == parent_process())
        dist.broadcast(ended, src=dist.get_process_group_ranks(self._group)[0], group=self._group)
        if ended:
            raise Stopped("before this restart: it was told to end", saved=True)
        if self._platform.rank == 0 and file.exists():
            file.unlink()

    def _loaded(self, roles: Sequence[SavedRole]) -> RunState | None:
        source, config = self._source, self._config
        if source is None:
            return None
        state, saved = source.saved.state, source.saved
        found = [
            changes(
                saved.config, config.model_dump(mode="json"), next_iteration=state.iteration + 1, fork=source.is_fork
            ),
            content_changes(saved.digests, self.digests, next_iteration=state.iteration + 1, fork=source.is_fork),
        ]
        for compared in found:
            compared.refuse()
        self.may_load_rollout = not source.is_fork and all(
            change.effect is Effect.FREE for compared in found for change in compared.found
        )
        self.is_fork = source.is_fork
        restore(source, roles, self._group)
        how = "a fork of" if source.is_fork else "resumes from"
        self.notes = [*source.notes, f"{how} {source.step}, after iteration {state.iteration}"]
        self.notes += [line for compared in found for line in compared.lines()]
        self.notes += not_compared(saved.digests, self.digests)
        if config.algorithm.kl.controller == "fixed":
            return replace(state, kl_coef=config.algorithm.kl.coef)
        return state

    def _minutes_are_over(self) -> bool:
        """By rank 0's clock, alike on all ranks. Collective where the config names minutes."""
        minutes = self._config.checkpoint.save_minutes
        if minutes is None or not self._saves:
            return False
        over = torch.tensor(time.monotonic() - self._saved_at >= 60 * minutes)
        dist.broadcast(over, src=dist.get_process_group_ranks(self._group)[0], group=self._group)
        return bool(over)

    def _check_best(self, recorder: Recorder) -> None:
        """Report once that a checkpoint lacks best_metric: the name of the metric may be wrong."""
        metric, metrics = self._config.checkpoint.best_metric, self._metrics
        evaluated = any(name.startswith("eval/") for name in metrics)
        if not self._may_lack_best or not metrics or (metric.startswith("eval/") and not evaluated):
            return
        self._may_lack_best = False
        if metric not in metrics:
            recorder.message(missing_best_metric(metric, metrics))

    def _check_progress(self, restarts: int) -> None:
        if self._platform.rank == 0 and self._saves:
            limit = self._config.checkpoint.max_restarts_without_progress
            iteration = self.state.iteration if self.state is not None else 0
            check_progress(self._config.run_dir, iteration, restarts=restarts, limit=limit)

    def _time_is_up(self) -> bool:
        """Whether another iteration, a save and one more iteration could not end in time."""
        hours = self._config.checkpoint.max_hours
        if hours is None:
            return False
        needed = self._longest_iteration + 2 * self._longest_save
        return time.monotonic() - self._started + needed > 3600 * hours

    def _save(self, state: RunState, recorder: Recorder) -> None:
        """Save the run, unless this state is saved. A checkpoint comes after the rows of all iterations in the run."""
        if not self._saves:
            return
        self._check_best(recorder)
        state = self.add_source_state(state)
        recorder.phase(f"saving iteration {state.iteration}")
        recorder.sync()
        before = self._saver.seconds
        forked_from = None if self._source is None else self._source.forked_from
        config = self._config.model_dump(mode="json")
        state = replace(state, kept={name: self._portable(tensors) for name, tensors in state.kept.items()})
        self._saver.save(SavedRun(state, config, self.digests, self._metrics, forked_from))
        self._saved_at = time.monotonic()
        self._longest_save = max(self._longest_save, self._saver.seconds - before)

    def _saved_if_possible(self, state: RunState, recorder: Recorder) -> str:
        """Save the run, which ends with an error: what came of that, to say behind the error. Collective."""
        self._saver.report = recorder.message
        try:
            self._save(state, recorder)
            self._saver.wait()
        except SaveError as error:
            return f"the run is not saved: {error}"
        if self._saver.last_iteration != state.iteration:
            return "the run is not saved"
        saved = self._root / step_name(state.iteration)
        return f"the run is saved after iteration {state.iteration} ({saved}), and the same command resumes"

    def _end(self, state: RunState, where: str) -> NoReturn:
        with self._watchdog.phase("save"):
            self._saver.wait()
        self._stop.disarm()
        why = self._stop.requested or "another rank was told, or checkpoint.max_hours are nearly over"
        saved = self._saver.last_iteration == state.iteration
        if self._platform.rank == 0 and saved:
            with contextlib.suppress(OSError):  # then torchrun's restarts, if it makes any, go on instead of ending
                (self._root / STOPPED).write_text(parent_process(), encoding="utf-8")
        dist.barrier(group=self._group)  # the first rank to leave ends the others
        raise Stopped(f"{where} ({why})", saved=saved)
