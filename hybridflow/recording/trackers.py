"""Weights & Biases and MLflow, beside metrics.csv: rank 0 sends each iteration's metrics to a service.

A run that goes on continues the run at the service. RUN_DIR/wandb.json and mlflow.json say which that is, and up to
which iteration it has rows: those of an iteration that is run again are not sent a second time. A run that starts anew,
and a fork, is a new one there.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from hybridflow.config import MetricsConfig, MlflowConfig, RunConfig, WandbConfig
from hybridflow.errors import EnvironmentProblem, Reasons
from hybridflow.recording.run_dir import replace_file
from hybridflow.recording.samples import Sample

Values = Mapping[str, float]
Say = Callable[[str], None]
T = TypeVar("T")
MODULES = {"wandb": "wandb", "mlflow": "mlflow"}  # key of `metrics`, and extra of the package -> what it brings
PARAMETERS, METRICS, CHARACTERS = 100, 1000, 6000  # of MLflow: in one request, and of a parameter's value
NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")  # MLflow refuses it
TABLE = ("prompt", "response", "score", "parts", "columns")  # of samples
MOST_TABLES = 50  # that MLflow's page lists as tables: a tag has room for so many
MOST_ROWS = 64  # of an iteration's table
RETRY_SECONDS = 60.0  # a service that has failed is left alone for this long: each try may take as much


def check_trackers(metrics: MetricsConfig) -> None:
    """Raise ConfigError, with a line for each, where a service is asked for whose package is not installed."""
    reasons = Reasons()
    for key, module in MODULES.items():
        if getattr(metrics, key) is not None:
            reasons.collect(_check_installed, key, module)
    reasons.refuse()


def _check_installed(key: str, module: str) -> None:
    spec = find_spec(module)
    if spec is None or spec.origin is None:  # a mere directory of that name, as offline runs leave them
        raise EnvironmentProblem(
            f"metrics.{key} is given, but the package {module} is not installed: pip install 'hybridflow[{key}]', or "
            f"leave metrics.{key} out"
        )


def open_trackers(config: RunConfig, *, goes_on: bool, say: Say) -> "list[WandbRun | MlflowRun]":
    """Those that the config asks for. Errors: EnvironmentProblem where a service refuses the run."""
    trackers: list[WandbRun | MlflowRun] = []
    if config.metrics.wandb is not None:
        trackers.append(WandbRun(config, config.metrics.wandb, goes_on=goes_on, say=say))
    if config.metrics.mlflow is not None:
        trackers.append(MlflowRun(config, config.metrics.mlflow, goes_on=goes_on, say=say))
    return trackers


class ServiceState:
    """Where a run stands at a service: the name there, and the last iteration that was sent. None, -1: nowhere yet."""

    def __init__(self, file: Path, *, goes_on: bool) -> None:
        self._file = file
        self.name: str | None = None
        self.last = -1
        if goes_on and file.exists():
            try:
                tree = json.loads(file.read_bytes())
                self.name, self.last = str(tree["name"]), int(tree["last"])
            except (ValueError, KeyError, TypeError) as error:
                raise EnvironmentProblem(
                    f"{file}: is damaged; without it the run is a new one there: {error}"
                ) from error

    def keep(self, name: str, last: int) -> None:
        self.name, self.last = name, last
        replace_file(self._file, [json.dumps({"name": name, "last": last}).encode() + b"\n"])


class WandbRun:
    """A run of Weights & Biases, whose files lie in RUN_DIR/wandb. A process of the package sends in the background.

    Where that process has ended, nothing more is sent, which one message reports; training goes on.
    """

    def __init__(self, config: RunConfig, wandb: WandbConfig, *, goes_on: bool, say: Say) -> None:
        import wandb as package

        self._place = ServiceState(config.run_dir / "wandb.json", goes_on=goes_on)
        self._say, self._lost, self._errors = say, False, (package.Error, OSError)
        self._table = package.Table
        try:
            self._run = package.init(
                project=wandb.project,
                entity=wandb.entity,
                name=config.name,
                id=self._place.name,
                resume="allow" if self._place.name and wandb.mode == "online" else None,
                mode=wandb.mode,
                dir=str(config.run_dir),
                config=config.model_dump(mode="json"),
                allow_val_change=True,
                settings=package.Settings(silent=True, console="off"),
            )
        except package.Error as error:
            raise EnvironmentProblem(f"metrics.wandb: the run cannot be opened: {error}") from error
        self._place.keep(self._run.id, self._place.last)
        offline = f"run {self._run.id}, offline, in {config.run_dir}/wandb"
        say(f"Weights & Biases: {offline if wandb.mode == 'offline' else self._run.url}")

    def write(self, iteration: int, values: Values) -> None:
        if iteration <= self._place.last or self._lost:
            return
        if self._done(lambda: self._run.log(dict(values), step=iteration), f"iteration {iteration} and what follows"):
            self._place.keep(self._run.id, iteration)

    def write_samples(self, iteration: int, rows: Sequence[Sample]) -> None:
        if iteration <= self._place.last or self._lost:
            return
        table = self._table(columns=list(TABLE), data=table_rows(rows))
        self._done(lambda: self._run.log({table_name(rows): table}, step=iteration), f"samples of {iteration}")

    def _done(self, call: Callable[[], object], what: str) -> bool:
        try:
            call()
        except self._errors as error:
            self._lost = True
            self._say(f"Weights & Biases does not get {what}, which metrics.csv has: {error}")
        return not self._lost

    def sync(self) -> None:
        """Only metrics.csv is read back."""

    def close(self) -> None:
        if not self._lost:
            self._done(self._run.finish, "the last rows for certain")


class MlflowRun:
    """A run of MLflow. Rows that the service does not take wait for the next row; one message reports them."""

    def __init__(self, config: RunConfig, mlflow: MlflowConfig, *, goes_on: bool, say: Say) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._place = ServiceState(config.run_dir / "mlflow.json", goes_on=goes_on)
        self._error: type[Exception] = MlflowException
        self._say, self._waiting, self._retry_at = say, list[tuple[int, int, Values]](), 0.0
        self._tables, self._lost_tables = list[str](), False
        try:
            self._client = MlflowClient(tracking_uri=mlflow.tracking_uri)
            self.name = self._opened(config, mlflow.experiment)
        except MlflowException as error:
            where = f"metrics.mlflow: the run cannot be opened at {mlflow.tracking_uri}"
            raise EnvironmentProblem(f"{where}: {error}") from error
        self._place.keep(self.name, self._place.last)
        say(f"MLflow: run {self.name} of {mlflow.experiment} at {mlflow.tracking_uri}")

    def _opened(self, config: RunConfig, experiment: str) -> str:
        """The service's name of the run that is there, or of a new run with the config as parameters."""
        from mlflow.entities import Param

        if self._place.name is not None:
            self._client.update_run(self._place.name, status="RUNNING")
            return self._place.name
        known = self._client.get_experiment_by_name(experiment)
        at = known.experiment_id if known else self._client.create_experiment(experiment)
        name = str(self._client.create_run(at, run_name=config.name).info.run_id)
        parameters = [Param(key, text[:CHARACTERS]) for key, text in _flat(config.model_dump(mode="json"))]
        for some in _batched(parameters, PARAMETERS):
            self._client.log_batch(name, params=some)
        return name

    def write(self, iteration: int, values: Values) -> None:
        if iteration <= self._place.last:
            return
        self._waiting.append((iteration, int(1000 * time.time()), values))
        if time.monotonic() >= self._retry_at:
            self._send()

    def write_samples(self, iteration: int, rows: Sequence[Sample]) -> None:
        """A file of each iteration and kind, as MLflow's own `log_table` writes, which needs pandas. No second try."""
        if iteration <= self._place.last or time.monotonic() < self._retry_at:
            return
        file = f"{table_name(rows)}_{iteration:06d}.json"
        try:
            self._client.log_dict(self.name, {"columns": list(TABLE), "data": table_rows(rows)}, file)
            if file not in self._tables:
                self._tables.append(file)
            shown = [{"path": table, "type": "table"} for table in self._tables[-MOST_TABLES:]]
            self._client.set_tag(self.name, "mlflow.loggedArtifacts", json.dumps(shown))
        except self._error as error:
            if not self._lost_tables:
                self._say(f"MLflow does not take the samples of iteration {iteration}; samples.jsonl has them: {error}")
            self._lost_tables = True

    def _send(self) -> None:
        while self._waiting:
            iteration, milliseconds, values = self._waiting[0]
            try:
                self._send_row(iteration, milliseconds, values)
            except self._error as error:
                if not self._retry_at:
                    self._say(f"MLflow does not take iteration {iteration}; it is sent again later: {error}")
                self._retry_at = time.monotonic() + RETRY_SECONDS
                return
            self._place.keep(self.name, iteration)
            self._waiting.pop(0)
        self._retry_at = 0.0

    def _send_row(self, iteration: int, milliseconds: int, values: Values) -> None:
        from mlflow.entities import Metric

        row = [Metric(NOT_IN_A_NAME.sub("_", name), x, milliseconds, iteration) for name, x in values.items()]
        for some in _batched(row, METRICS):
            self._client.log_batch(self.name, metrics=some)

    def sync(self) -> None:
        """Only metrics.csv is read back."""

    def close(self) -> None:
        self._send()
        if self._waiting:
            self._say(f"MLflow has not taken the last {len(self._waiting)} iterations; metrics.csv has them")
            return
        self._client.set_terminated(self.name)


def table_name(rows: Sequence[Sample]) -> str:
    """Of rows of one kind."""
    return f"samples/{rows[0]['kind']}"


def table_rows(rows: Sequence[Sample]) -> list[list[str | float | None]]:
    """The first rows, by TABLE; what is no text or number is JSON."""
    return [
        [row["prompt"], row["response"], row["score"], json.dumps(dict(row["parts"])), json.dumps(dict(row["columns"]))]
        for row in rows[:MOST_ROWS]
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)


def _batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))
