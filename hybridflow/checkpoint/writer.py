"""Saving a run: every rank has a `CheckpointWriter` and calls it at the same places.

    saver.save(saved)       copies or writes; training may go on when it returns
    saver.check()           whether a save in the background is over; raises what went wrong with it, on every rank
    saver.wait()            until it is over

Each rank writes one file for each role and reports the file through the store. After all reports rank 0 adds the
description of the whole and names the directory (`store.publish`). With `async_save` a thread does this work. The
tensors are copied to host memory first, and the memory of the copies stays for the next save.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hybridflow.architecture.peft_directory import write_adapter_config
from hybridflow.architecture.spec import config_changes
from hybridflow.checkpoint.sharded import SavedRole, ToWrite, finish_save, prepare_save
from hybridflow.checkpoint.state import SavedRun, load_state, write_state
from hybridflow.checkpoint.store import (
    begin,
    publish,
    read_manifest,
    remove,
    step_name,
    steps,
    superfluous,
)
from hybridflow.config import CheckpointConfig
from hybridflow.data.tokenizers import keep_tokenizer_class
from hybridflow.errors import CheckpointError, SaveError
from hybridflow.formats.directories import FileSum
from hybridflow.formats.distributed_storage import Chunk, ChunkRecord, write_records
from hybridflow.formats.file_bytes import memory_of
from hybridflow.formats.huggingface_files import copy_companions, write_config
from hybridflow.formats.weights_digest import base_digest
from hybridflow.models.layer_specs import DTYPES
from hybridflow.models.memory import host_tensors
from hybridflow.parallel.agreement import failures
from hybridflow.parallel.platform import Platform

POLL_SECONDS = 0.02  # between looks at how many ranks have written
LEAST_PRIORITY = 19  # as nice(1) has it
SPARE_BYTES = 1 << 20  # for what describes the tensors


@dataclass
class _Save:
    """One that is under way. `over`: here, and on rank 0 everywhere; then `failure`: what went wrong, and `warning`:
    what did once it was a checkpoint."""

    iteration: int
    partial: Path
    parts: Sequence[tuple[str, ToWrite]]  # (role, what this rank writes of it)
    num_bytes: int  # of all ranks
    over: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None
    warning: str | None = None


class CheckpointWriter:
    """Saves a run (see the module). seconds: training time that saves have cost since the caller set it to zero."""

    def __init__(
        self,
        roles: Sequence[SavedRole],
        root: Path,
        config: CheckpointConfig,
        *,
        config_yaml: str,
        platform: Platform,
        group: dist.ProcessGroup,
        store: Store,
        report: Callable[[str], None] = lambda text: None,
        check_lock: Callable[[], None] = lambda: None,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        self._roles, self._root, self._config, self._config_yaml = roles, root, config, config_yaml
        self._platform, self._group, self._store, self.report = platform, group, store, report
        self._ranks = dist.get_process_group_ranks(group)
        self._check_lock = check_lock  # on rank 0, before a checkpoint is named
        self._digests = digests or {}
        self._under_way: _Save | None = None
        self._copies: list[Tensor] = []
        self._waiting: SimpleQueue[_Save] | None = None  # for the thread that writes, once there is one
        self._count = 0
        self.seconds = 0.0
        self.last_iteration: int | None = None  # of the last that became a checkpoint

    def save(self, saved: SavedRun) -> None:
        """Save the run after an iteration, unless that is done. One that is under way is waited for first. Collective.

        Errors: SaveError, where checkpoint.on_error is stop; else it is reported.
        """
        self.wait()
        if self.last_iteration == saved.state.iteration:
            return
        with self._timed():
            self._save(saved)

    def check(self) -> None:
        """End a save that is over on all ranks. Collective where one is under way. Errors: as `save`."""
        save = self._under_way
        if save is None:
            return
        running = torch.tensor(not save.over.is_set(), dtype=torch.int32)
        dist.all_reduce(running, op=dist.ReduceOp.MAX, group=self._group)
        if not running:
            self.wait()

    def wait(self) -> None:
        """Block until the save that is under way is over, if there is one. Errors: as `save`."""
        save = self._under_way
        if save is None:
            return
        with self._timed():
            save.over.wait()
            self._finish(save)

    # ---- in the foreground

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def _save(self, saved: SavedRun) -> None:
        iteration = saved.state.iteration
        self._count += 1
        try:
            save = self._begun(saved)
        except SaveError as error:
            if self._platform.rank == 0:  # room for the next attempt
                shutil.rmtree(self._root / f".{step_name(iteration)}.partial", ignore_errors=True)
            self._failed(error)
            return
        self._under_way = save
        if not self._config.async_save:
            self._write(save)
            self._finish(save)
            return
        self._in_background(save)

    def _begun(self, saved: SavedRun) -> _Save:
        """A directory with everything but tensors, and what each rank has to write into it. Errors: SaveError."""
        iteration, names = saved.state.iteration, [role.name for role in self._roles]
        failure: str | None = None
        if self._platform.rank == 0:
            failure = _tried(lambda: self._describe(saved, begin(self._root, iteration, names)), self._root)
        self._raise_together(failure, iteration)
        partial, parts = self._root / f".{step_name(iteration)}.partial", list[tuple[str, ToWrite]]()

        def prepare() -> None:
            parts.extend((role.name, prepare_save(role, partial / role.name)) for role in self._roles)

        self._raise_together(_tried(prepare, partial), iteration)
        total = torch.tensor(sum(part.num_bytes for _, part in parts), dtype=torch.int64)
        dist.all_reduce(total, group=self._group)
        save = _Save(iteration, partial, parts, int(total))
        if self._platform.rank == 0:
            failure = _tried(lambda: self._check_room(save), partial)
        self._raise_together(failure, iteration)
        if self._config.async_save:
            self._raise_together(_tried(lambda: self._copy(save), partial), iteration)
        return save

    def _describe(self, saved: SavedRun, partial: Path) -> None:
        write_state(partial, saved)
        (partial / "config.yaml").write_text(self._config_yaml, encoding="utf-8")
        for role in self._roles:
            directory, spec = partial / role.name, role.spec
            changes = config_changes(spec, role.head)
            write_config(spec.path, directory, changes, section=spec.config_section, dtype=DTYPES[role.dtype])
            copy_companions(spec.path, directory)
            keep_tokenizer_class(spec.path, directory)
            if spec.lora is not None:
                write_adapter_config(directory, spec, role.head, base_digest(self._digests, role.name))

    def _check_room(self, save: _Save) -> None:
        free, needed = shutil.disk_usage(save.partial).free, save.num_bytes + SPARE_BYTES
        if free < needed:
            raise CheckpointError(f"{save.partial}: needs {needed} bytes, the disk has {free} left")

    def _copy(self, save: _Save) -> None:
        """Have it read from copies in host memory."""
        chunks = [chunk for _, part in save.parts for chunk in part.chunks]
        if not self._copies:
            self._copies = [*host_tensors((chunk.shape, chunk.dtype) for chunk in chunks)]
        for chunk, copy in zip(chunks, self._copies, strict=True):
            for source, target in _in_runs(chunk.read(), copy):
                if source.device.type == "cpu":  # torch's own copy runs at 0.6 of memcpy's rate on one thread
                    memory_of(target)[:] = memory_of(source)
                else:
                    target.copy_(source, non_blocking=True)
        self._platform.synchronize()
        copies = iter(self._copies)
        save.parts = [
            (role, replace(part, chunks=tuple(_reading(chunk, next(copies)) for chunk in part.chunks)))
            for role, part in save.parts
        ]

    def _finish(self, save: _Save) -> None:
        """Once this rank has nothing left to do for it: what became of it on all."""
        self._under_way = None
        try:
            self._raise_together(save.failure, save.iteration)
        except SaveError as error:
            self._failed(error)
            return
        self.last_iteration = save.iteration
        self.report(f"saved {step_name(save.iteration)}: {save.num_bytes / 1e6:.1f} MB")
        if save.warning is not None:
            self.report(f"warning: an old checkpoint cannot be removed: {save.warning}")

    def _raise_together(self, failure: str | None, iteration: int) -> None:
        found = failures(failure, self._group)
        if found:
            left = [step_name(i) for i in steps(self._root) if i != iteration]
            kept = f"{self._root / left[-1]} is as it was" if left else "there is none before it"
            raise SaveError(f"the checkpoint of iteration {iteration} cannot be written: {'; '.join(found)} ({kept})")

    def _failed(self, error: SaveError) -> None:
        if self._config.on_error == "stop":
            raise error
        self.report(f"warning: {error}; the run continues (checkpoint.on_error = continue)")

    # ---- in the background, if there is one

    def _in_background(self, save: _Save) -> None:
        """One thread for all saves: glibc gives each thread a heap, and keeps the heap when the thread ends."""
        if self._waiting is None:
            self._waiting = SimpleQueue()
            threading.Thread(target=self._serve, args=(self._waiting,), name="hybridflow save", daemon=True).start()
        self._waiting.put(save)

    def _serve(self, waiting: "SimpleQueue[_Save]") -> None:
        """With what training leaves of the cores: Linux has a priority for every thread."""
        with suppress(OSError):  # a container may forbid it: the others then wait for this save like for any
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        while True:
            self._write(waiting.get())

    def _write(self, save: _Save) -> None:
        """This rank's files, and on rank 0 the checkpoint. No collective: another thread may be in one."""
        try:
            save.failure = _tried(lambda: self._write_own(save), save.partial)
            save.failure = _tried(lambda: self._tell_and_publish(save), save.partial) or save.failure
        finally:
            save.over.set()

    def _tell_and_publish(self, save: _Save) -> None:
        key, done = f"checkpoint/{self._count}", save.failure is None
        if not done:
            self._store.add(f"{key}/failed", 1)
        self._store.add(f"{key}/written", 1)
        if self._platform.rank != 0:
            return
        while self._store.add(f"{key}/written", 0) < len(self._ranks):
            time.sleep(POLL_SECONDS)
        try:
            if not self._store.add(f"{key}/failed", 0):
                self._publish(save)
        finally:
            if save.partial.exists():  # room for the next attempt
                shutil.rmtree(save.partial, ignore_errors=True)

    def _write_own(self, save: _Save) -> None:
        for role, part in save.parts:
            directory, name = save.partial / role, f"__{self._platform.rank}_0.distcp"
            records, its_sum = write_records(directory, name, part.chunks, part.empty)
            own = {"file": asdict(its_sum), "records": [asdict(record) for record in records]}
            (directory / _part_name(self._platform.rank)).write_text(json.dumps(own), encoding="utf-8")

    def _publish(self, save: _Save) -> None:
        sums: dict[str, FileSum] = {}
        for role, _ in save.parts:
            directory, records = save.partial / role, list[ChunkRecord]()
            for rank in self._ranks:
                file = directory / _part_name(rank)
                part = json.loads(file.read_text(encoding="utf-8"))
                sums[f"{role}/__{rank}_0.distcp"] = FileSum(**part["file"])
                records += [_record(tree) for tree in part["records"]]
                file.unlink()
            finish_save(directory, records)
        self._check_lock()
        publish(self._root, save.iteration, save.partial, sums)
        save.warning = _tried(lambda: self._prune(save.iteration), self._root)

    def _prune(self, newest: int) -> None:
        """Old checkpoints go only now that the new one is durable. What is damaged is left for a person to look at.

        Later ones than the new one are no checkpoints of this run any more: it went on from an older one since they
        are damaged, and they must not take the place of those that are kept.
        """
        metrics: dict[int, Mapping[str, float]] = {}
        for iteration in steps(self._root):
            if iteration > newest:
                continue
            try:
                read_manifest(self._root / step_name(iteration))
                metrics[iteration] = load_state(self._root / step_name(iteration)).metrics
            except CheckpointError:
                continue
        config = self._config
        for iteration in superfluous(
            metrics,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            best=config.best_metric,
            best_is=config.keeps,
        ):
            remove(self._root, iteration)


def _tried(work: Callable[[], None], where: Path) -> str | None:
    """Why it failed. A rank must not leave alone: the others would wait for it. where: if the error does not say."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or where}: {error.strerror or error}"
    except Exception as error:  # becomes an error of the run on all ranks
        return f"{type(error).__name__}: {error}"
    return None


def _in_runs(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Contiguous pairs of the same elements: a device copies other elements through extra memory on the device."""
    if source.is_contiguous():
        yield source, target
        return
    for part, its_target in zip(source, target, strict=True):
        yield from _in_runs(part, its_target)


def _reading(chunk: Chunk, copy: Tensor) -> Chunk:
    return replace(chunk, read=lambda: copy)


def _part_name(rank: int) -> str:
    return f".rank_{rank:05d}.json"


def _record(tree: dict[str, Any]) -> ChunkRecord:
    """JSON has lists for tuples."""
    tuples = {name: tuple(value) for name, value in tree.items() if isinstance(value, list)}
    return ChunkRecord(**(tree | tuples))
