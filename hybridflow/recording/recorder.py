"""What a run writes and shows while it goes: rank 0 records, the other ranks stay silent."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config import RunConfig
from hybridflow.errors import RecordError
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.recording.iteration import Iteration
from hybridflow.recording.progress import OF_SET, ProgressDisplay
from hybridflow.recording.prometheus import PrometheusServer
from hybridflow.recording.resume import KeptMetrics, remove_batches
from hybridflow.recording.run_dir import dump_batch, open_run_dir, reopen_run_dir, write_layout, writing
from hybridflow.recording.samples import chosen_rows, samples_of
from hybridflow.recording.starts import recorded_start
from hybridflow.recording.trackers import open_trackers
from hybridflow.recording.writers import ExpertsLoadWriter, MetricsWriter, SampleWriter

BEFORE = {  # what is shown of the evaluation before training
    "eval/accuracy": "accuracy {:.3f}",
    "eval/loss": "loss {:.4f}",
    "eval/reward_accuracy": "pairs right {:.3f}",
}


@dataclass(frozen=True)
class RunSummary:
    """What a person wants to know at the end of a run; `seconds` count from the last start of the run."""

    accuracy_before: float | None
    accuracy_after: float | None
    score_first: float | None
    score_last: float | None
    tokens_per_sec: float
    seconds: float
    loss_before: float | None = None  # of held-out rows of fixed data, this and the next three
    loss_after: float | None = None
    pairs_before: float | None = None
    pairs_after: float | None = None
    accuracies: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # before and after, of sets by name

    @classmethod
    def unknown(cls) -> "RunSummary":
        """Of a rank that trains nothing."""
        return cls(None, None, None, None, tokens_per_sec=0.0, seconds=0.0)

    def rows(self, run_dir: Path, *, exported: bool = True) -> list[tuple[str, str]]:
        """(name, value) pairs for the closing table. exported: whether the trained model was written."""
        rows = []
        if self.accuracy_before is not None and self.accuracy_after is not None:
            rows.append(("held-out accuracy", _gained(self.accuracy_before, self.accuracy_after)))
        rows += [(f"accuracy on {name}", _gained(*both)) for name, both in self.accuracies.items()]
        if self.score_first is not None and self.score_last is not None:
            rows.append(("mean score", f"{self.score_first:.3f} -> {self.score_last:.3f} (first and last iteration)"))
        if self.loss_before is not None and self.loss_after is not None:
            rows.append(("held-out loss", f"{self.loss_before:.4f} -> {self.loss_after:.4f}"))
        if self.pairs_before is not None and self.pairs_after is not None:
            rows.append(("held-out pairs right", f"{self.pairs_before:.1%} -> {self.pairs_after:.1%}"))
        return rows + [
            ("throughput", f"{self.tokens_per_sec:.0f} tokens/s"),
            ("time", f"{self.seconds:.0f} s"),
            ("run directory", str(run_dir)),
            *([("trained model", str(run_dir / "hf"))] if exported else []),
            *([("adapters", str(run_dir / "adapter"))] if exported and (run_dir / "adapter").is_dir() else []),
        ]


def _gained(before: float, after: float) -> str:
    return f"{before:.1%} -> {after:.1%} ({100 * (after - before):+.1f} points)"


class Recorder:
    """Keeps the history that every rank needs for the summary; shows nothing and writes nothing."""

    def __init__(self) -> None:
        self.failure: str | None = None  # the first thing that could not be written
        self._started = time.perf_counter()
        self._accuracies: list[float] = []
        self._of_sets: dict[str, tuple[float, float]] = {}  # accuracies, the first and the last
        self._losses: list[float] = []
        self._pairs: list[float] = []
        self._scores: list[float] = []
        self._rates: list[float] = []

    def phase(self, text: str) -> None:
        """What is going on now."""

    def message(self, text: str) -> None:
        """A line for the person who watches."""

    def layout(
        self,
        world_size: int,
        roles: Mapping[str, Layout],
        rollout: RolloutLayout | None,
        kv_cache: Mapping[str, Any] | None = None,
    ) -> None:
        """Where the run lies, and the size of the engine's cache."""

    def before_training(self, evaluation: dict[str, float]) -> None:
        self.recall([evaluation])

    def evaluated(self, done: Iteration, evaluation: dict[str, float]) -> None:
        self.recall([evaluation])
        done.metrics.update(evaluation)

    def heldout(self, iteration: int, name: str, prompts: PromptBatch, responses: RolloutBatch, marks: Tensor) -> None:
        """Responses to held-out prompts, after this iteration. name: of the set. marks: (N,) of who says what is right.

        The same prompts are shown each time: so a person sees what becomes of their answers.
        """

    def lost(self, iteration: int, reason: str, tensors: Mapping[str, Tensor]) -> None:
        """A number among these is not finite, and the iteration ends with a step less."""

    def iteration(self, done: Iteration) -> None:
        if "reward/score_mean" in done.metrics:
            self._scores.append(float(done.metrics["reward/score_mean"]))
        self._rates.append(float(done.metrics["train/tokens_per_sec"]))

    def sync(self) -> None:
        """The rows and samples so far are on the disk when this returns: before a checkpoint counts on them."""

    def recall(self, rows: Iterable[Mapping[str, float]]) -> None:
        """What the summary is made of: also of the rows that an earlier start of the run has written."""
        for row in rows:
            for name, known in self._remembered().items():
                if name in row:
                    known.append(row[name])
            for name, value in row.items():
                if found := OF_SET.fullmatch(name):
                    self._of_sets[found[1]] = (self._of_sets.get(found[1], (value,))[0], value)

    def _remembered(self) -> dict[str, list[float]]:
        return {
            "eval/accuracy": self._accuracies,
            "eval/loss": self._losses,
            "eval/reward_accuracy": self._pairs,
            "reward/score_mean": self._scores,
            "train/tokens_per_sec": self._rates,
        }

    def summary(self) -> RunSummary:
        return RunSummary(
            accuracy_before=self._accuracies[0] if self._accuracies else None,
            accuracy_after=self._accuracies[-1] if self._accuracies else None,
            score_first=self._scores[0] if self._scores else None,
            score_last=self._scores[-1] if self._scores else None,
            tokens_per_sec=sum(self._rates) / max(len(self._rates), 1),
            seconds=time.perf_counter() - self._started,
            loss_before=self._losses[0] if self._losses else None,
            loss_after=self._losses[-1] if self._losses else None,
            pairs_before=self._pairs[0] if self._pairs else None,
            pairs_after=self._pairs[-1] if self._pairs else None,
            accuracies=dict(self._of_sets),
        )


class WritingRecorder(Recorder):
    """Rank 0's: metrics.csv, experts_load.csv, TensorBoard, services, samples.jsonl, batches/, the progress display."""

    def __init__(
        self,
        config: RunConfig,
        progress: ProgressDisplay,
        *,
        metrics: MetricsWriter,
        samples: SampleWriter,
        experts_load: ExpertsLoadWriter,
        decode: Callable[[list[int]], str],
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._check_lock = check_lock
        self._config, self._progress, self._decode = config, progress, decode
        self._metrics, self._samples, self._experts_load = metrics, samples, experts_load

    def phase(self, text: str) -> None:
        self._progress.phase(text)

    def message(self, text: str) -> None:
        self._progress.message(text)

    def layout(
        self,
        world_size: int,
        roles: Mapping[str, Layout],
        rollout: RolloutLayout | None,
        kv_cache: Mapping[str, Any] | None = None,
    ) -> None:
        with self._noted():
            write_layout(self._config.run_dir, world_size, roles, rollout, kv_cache)

    def before_training(self, evaluation: dict[str, float]) -> None:
        super().before_training(evaluation)
        with self._noted():
            self._metrics.write(0, evaluation)
        known = [text.format(evaluation[name]) for name, text in BEFORE.items() if name in evaluation]
        known += [f"{found[1]} {evaluation[name]:.3f}" for name in evaluation if (found := OF_SET.fullmatch(name))]
        self.message(f"before training: held-out {', '.join(known)}")

    def lost(self, iteration: int, reason: str, tensors: Mapping[str, Tensor]) -> None:
        where = "nowhere"
        with self._noted():
            where = f"in {dump_batch(self._config.run_dir, f'nonfinite_{iteration:06d}', tensors)}"
        with self._noted():
            self._metrics.write(iteration, {"train/lost_to_nonfinite": 1.0})
        self.message(f"iteration {iteration}: {reason}; the iteration took no step, and its batch is {where}")

    def iteration(self, done: Iteration) -> None:
        super().iteration(done)
        self._check_lock()
        if self._config.metrics.dump_batches:
            tensors = done.batch.tensors() if done.portable is None else done.portable
            with self._noted():
                dump_batch(self._config.run_dir, f"iteration_{done.number:06d}", tensors)
        with self._noted():
            self._write_samples(done)
        with self._noted():
            self._metrics.write(done.number, done.metrics)
        with self._noted():
            self._experts_load.write(done.number, done.experts_load)
        self._progress.iteration(done.number, done.metrics)

    def sync(self) -> None:
        self._check_lock()
        with self._noted():
            for file in self._files:
                file.sync()

    def close(self) -> None:
        """What could not be written is tried once more."""
        for file in self._files:
            with self._noted():
                file.close()

    @property
    def _files(self) -> list[MetricsWriter | SampleWriter | ExpertsLoadWriter]:
        return [self._metrics, self._samples, self._experts_load]

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """What cannot be written ends the run after the iteration, when it is saved: not here, on one rank alone."""
        try:
            yield
        except RecordError as error:
            if self.failure is None:
                self.failure = str(error)
                self.message(f"warning: {error}")

    def _write_samples(self, done: Iteration) -> None:
        batch, number = done.batch, self._config.metrics.num_samples
        seed = f"{self._config.seed}/{done.number}"
        groups = self._config.metrics.num_groups
        rows = chosen_rows(batch.prompt_indices, len(done.prompts), number, seed=seed, groups=groups)
        scores, parts = vars(batch).get("raw_scores"), done.score_parts
        if scores is not None:
            scores = scores.masked_fill(batch.failed, float("nan"))
        found = samples_of(batch, done.prompts, rows, self._decode, kind="train", scores=scores, parts=parts)
        self._samples.write(done.number, found)

    def heldout(self, iteration: int, name: str, prompts: PromptBatch, responses: RolloutBatch, marks: Tensor) -> None:
        number = self._config.metrics.num_samples
        rows = chosen_rows(responses.prompt_indices, len(prompts), number, seed=f"{self._config.seed}")
        found = samples_of(responses, prompts, rows, self._decode, kind="heldout", scores=marks, parts={}, name=name)
        with self._noted():
            self._samples.write(iteration, found)


@contextlib.contextmanager
def record_run(
    config: RunConfig,
    num_iterations: int,
    *,
    rank: int,
    decode: Callable[[list[int]], str],
    resumed: int | None = None,
    forked: int = 0,
    check_lock: Callable[[], None] = lambda: None,
) -> Iterator[Recorder]:
    """The recorder of this rank, for the time of a run.

    resumed: the iteration after which the run goes on, in the directory that is there: what it holds of later ones
    goes away. None: it starts a new directory, and an earlier one moves aside.
    forked: of a new run, the iteration of another after which it begins.
    check_lock: raises RunTakenError where the directory is another process's by now. Rank 0 asks before it writes.

    The summary of a resumed run covers all of it on rank 0, which has the files; on others what they saw themselves.
    """
    if rank != 0:
        yield Recorder()
        return
    check_lock()
    with writing(config.run_dir):
        notes = _opened(config, resumed)
    written = config.metrics
    completed = forked if resumed is None else resumed
    with recorded_start(config.run_dir), ProgressDisplay(num_iterations, completed=completed) as progress:
        trackers = open_trackers(config, goes_on=resumed is not None, say=progress.message)
        served = [PrometheusServer(config.name, written)] if written.prometheus_port is not None else []
        metrics = MetricsWriter(
            config.run_dir,
            csv=written.csv,
            tensorboard=written.tensorboard,
            resumed=resumed,
            others=[*trackers, *served],
        )
        samples = SampleWriter(config.run_dir / "samples.jsonl", resumed=resumed, tables=trackers)
        recorder = WritingRecorder(
            config,
            progress,
            metrics=metrics,
            samples=samples,
            experts_load=ExpertsLoadWriter(config.run_dir, csv=written.csv, resumed=resumed),
            decode=decode,
            check_lock=check_lock,
        )
        if resumed is not None:
            notes += _gaps(config, metrics.kept, resumed)
            recorder.recall(metrics.kept.numbers() if metrics.kept else ())
        for note in notes:
            recorder.message(note)
        try:
            yield recorder
        finally:
            recorder.close()


def _opened(config: RunConfig, resumed: int | None) -> list[str]:
    """Have the run directory as the run needs it; what to say of what was there."""
    path = config.run_dir
    if resumed is None:
        moved = open_run_dir(path, config.to_yaml())
        return [] if moved is None else [f"{path} held an earlier run; it is now {moved}"]
    former = reopen_run_dir(path, config.to_yaml())
    removed = remove_batches(path / "batches", resumed)
    notes = [] if former is None else [f"{path / 'config.yaml'} has changed; the former one is now {former}"]
    if removed:
        files = f"{len(removed)} batch{'es' * (len(removed) > 1)} from {removed[0].name} on"
        notes.append(f"{path / 'batches'}: removed {files}, of iterations that are run again")
    return notes


def _gaps(config: RunConfig, kept: KeptMetrics | None, resumed: int) -> list[str]:
    """What to say where metrics.csv does not reach the iteration that the run goes on after."""
    file = config.run_dir / "metrics.csv"
    if not config.metrics.csv:
        return []
    if kept is None:
        return [f"{file} is not there: a new one begins with iteration {resumed + 1}"]
    missing = kept.missing(resumed)
    if not missing:
        return []
    return [f"{file} has no row of {len(missing)} of the iterations up to {resumed}, the first is {missing[0]}"]
