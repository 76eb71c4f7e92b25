"""Weights & Biases and MLflow: asked for without their packages, and for real where these are installed.

W&B writes offline, and what it wrote is read back from its files; MLflow writes to a directory of its own.
"""

import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.config import ExperimentConfig, MetricsConfig, MlflowConfig, WandbConfig
from hybridflow.errors import ConfigError, EnvironmentProblem
from hybridflow.recording.recorder import record_run
from hybridflow.recording.trackers import MOST_ROWS, TABLE, MlflowRun, ServiceState, check_trackers, table_rows
from tests.messages import like
from tests.recording.test_resume import config, record

ROOT = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------------------------------------ without the packages


def test_nothing_is_needed_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    check_trackers(MetricsConfig())


def test_a_missing_package_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it could not be found
    asked = MetricsConfig(wandb={"project": "p"}, mlflow={"experiment": "e", "tracking_uri": "http://x"})
    with pytest.raises(ConfigError) as error:
        check_trackers(asked)
    assert str(error.value).splitlines() == [
        f"metrics.{name} is given, but the package {name} is not installed: pip install 'hybridflow[{name}]', or leave "
        f"metrics.{name} out"
        for name in ("wandb", "mlflow")
    ]


def test_a_directory_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline run leaves one; where the working directory is searched it can be imported, and has nothing in it."""
    (tmp_path / "wandb" / "offline-run").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="the package wandb is not installed"):
        check_trackers(MetricsConfig(wandb={"project": "p"}))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"wandb": {}}, "metrics.wandb.project"),
        ({"wandb": {"project": "p", "mode": "sometimes"}}, "metrics.wandb.mode"),
        ({"wandb": {"project": "p", "tags": []}}, "metrics.wandb.tags"),
        ({"mlflow": {"experiment": "e"}}, "metrics.mlflow.tracking_uri"),
    ],
)
def test_wrong_keys_are_named(metrics: dict, message: str, tmp_path: Path) -> None:
    tree = config(tmp_path).model_dump()
    tree["metrics"] |= metrics
    with pytest.raises(ConfigError, match=message):
        ExperimentConfig.from_tree(tree, "config.yaml")


def test_where_a_run_stands_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "wandb.json"
    ServiceState(file, goes_on=False).keep("abc", 7)
    found = ServiceState(file, goes_on=True)
    assert (found.name, found.last) == ("abc", 7)
    assert (ServiceState(file, goes_on=False).name, ServiceState(tmp_path / "absent", goes_on=True).last) == (None, -1)
    file.write_text('{"name": "abc"}')
    with pytest.raises(
        EnvironmentProblem, match=r"wandb.json: is damaged; without it the run is a new one there: 'last'"
    ):
        ServiceState(file, goes_on=True)


# ------------------------------------------------------------------------------------------------ a run that goes on


def written(c: ExperimentConfig) -> None:
    """Five iterations, the fourth of which ends before a checkpoint that is of the second: 3 and 4 run again."""
    with pytest.raises(ZeroDivisionError), record_run(c, 5, rank=0, decode=str) as recorder:
        record(recorder, range(5))
        raise ZeroDivisionError
    with record_run(c, 5, rank=0, decode=str, resumed=2) as recorder:
        record(recorder, range(3, 6))


def of_samples(c: ExperimentConfig, iteration: int) -> list:
    """A row of the iteration's table, from samples.jsonl."""
    samples = map(json.loads, (c.run_dir / "samples.jsonl").read_text().splitlines())
    [row] = [row for row in samples if row["iteration"] == iteration]
    return [row["prompt"], row["response"], row["score"], json.dumps(row["parts"]), json.dumps(row["columns"])]


def test_a_table_has_the_first_rows_and_json_for_what_is_no_text() -> None:
    row = {"kind": "train", "prompt": "p", "response": "r", "score": None, "parts": {"a": 0.5}, "columns": {"x": [1]}}
    found = table_rows([row] * (MOST_ROWS + 1))
    assert len(found) == MOST_ROWS and found[0] == ["p", "r", None, '{"a": 0.5}', '{"x": [1]}']


SCORES = {i: i / 3 for i in range(1, 6)}  # reward/score_mean by iteration


def test_wandb_gets_every_iteration_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    c = config(tmp_path, wandb=WandbConfig(project="tests", mode="offline"), dump_batches=False)
    written(c)
    files = sorted((c.run_dir / "wandb").glob("offline-run-*/*.wandb"))
    place = json.loads((c.run_dir / "wandb.json").read_text())
    assert len(files) == 2 and place["last"] == 5
    assert all(file.stem == f"run-{place['name']}" for file in files), "the second start goes on with the run"
    first, second = wandb_rows(files[0], 5), wandb_rows(files[1], 1)
    assert [step for step, _ in first] == [0, 1, 2, 3, 4] and [step for step, _ in second] == [5]
    rows = dict(first + second)
    assert {step: row["reward/score_mean"] for step, row in rows.items() if step} == SCORES
    assert rows[0]["eval/accuracy"] == 0.25 and rows[4]["eval/accuracy"] == 0.5
    sizes = {
        tuple(row[f"samples/train/{key}"] for key in ("_type", "nrows", "ncols")) for row in list(rows.values())[1:]
    }
    assert sizes == {("table-file", 1, 5)}
    shown = (files[0].parent / "files" / rows[4]["samples/train/path"]).read_text()
    assert json.loads(shown) == {"columns": list(TABLE), "data": [of_samples(c, 4)]}
    assert f"Weights & Biases: run {place['name']}, offline, in {c.run_dir}/wandb" in capsys.readouterr().out


LOST = """
import json, os, signal, sys, time
from pathlib import Path

from hybridflow.config import WandbConfig
from hybridflow.recording.trackers import WandbRun
from tests.recording.test_resume import config

c, said = config(Path(sys.argv[1])), []
c.run_dir.mkdir()
run = WandbRun(c, WandbConfig(project="tests", mode="offline"), goes_on=False, say=said.append)
run.write(1, {"a": 1.0})
def of(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:  # it has ended
        return ""

pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
own = [pid for pid in pids if f"PPid:\\t{os.getpid()}\\n" in of(pid, "status")]
[sends] = [pid for pid in own if "wandb" in of(pid, "cmdline")]
os.kill(sends, signal.SIGKILL)
time.sleep(0.5)
for iteration in (2, 3):
    run.write(iteration, {"a": 2.0})
run.close()
print(json.dumps(said[1:]))
"""


@pytest.mark.slow
def test_training_goes_on_without_the_process_that_sends(tmp_path: Path) -> None:
    """In a process that does not know of ours: all runs of a process, and of those that it starts, share one."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-c", LOST, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lost = "Weights & Biases does not get iteration 2 and what follows, which metrics.csv has: Connection lost"
    assert json.loads(done.stdout.splitlines()[-1]) == [lost]
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["last"] == 1


def wandb_rows(file: Path, expected: int) -> list[tuple[int, dict]]:
    """Those of a .wandb file when it has so many: W&B writes on after an offline run has ended here."""
    end = time.monotonic() + 30
    while len(rows := rows_of(file)) < expected and time.monotonic() < end:
        time.sleep(0.1)
    return rows


def rows_of(file: Path) -> list[tuple[int, dict]]:
    """(step, values) of every row of a .wandb file, which is a log of LevelDB's format with 7 bytes before it."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for text in leveldb_records(file.read_bytes(), start=7):
        record = Record.FromString(text)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append((int(items["_step"]), items))
    return rows


def leveldb_records(data: bytes, start: int) -> Iterator[bytes]:
    """Blocks of 32 KiB; a record's parts have checksum, length and kind: whole, first, middle or last.

    The file may be read while it is written: a part that is not there to its end is not there yet.
    """
    at, record = start, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowConfig:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else it insists on a database, which the client has not
    return MlflowConfig(experiment="tests", tracking_uri=(tmp_path / "store").as_uri())


def test_mlflow_gets_every_iteration_once(mlflow: MlflowConfig, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    c = config(tmp_path, mlflow=mlflow, dump_batches=False)
    written(c)
    client = MlflowClient(tracking_uri=mlflow.tracking_uri)
    [run] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert json.loads((c.run_dir / "mlflow.json").read_text()) == {"name": run.info.run_id, "last": 5}
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["actor.optimizer.lr"] == "0.001" and run.data.params["metrics.mlflow.experiment"] == "tests"
    history = client.get_metric_history(run.info.run_id, "reward/score_mean")
    assert [(metric.step, metric.value) for metric in history] == list(SCORES.items())
    tables = [f"samples/train_{i:06d}.json" for i in range(1, 6)]
    assert sorted(file.path for file in client.list_artifacts(run.info.run_id, "samples")) == tables
    shown = Path(client.download_artifacts(run.info.run_id, tables[3])).read_text()
    assert json.loads(shown) == {"columns": list(TABLE), "data": [of_samples(c, 4)]}
    listed = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert listed[-1] == {"path": tables[4], "type": "table"}
    history = client.get_metric_history(run.info.run_id, "eval/accuracy")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.25), (4, 0.5)]


def test_what_mlflow_does_not_take_is_sent_again(
    mlflow: MlflowConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told once, left alone for a while, and in order."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    c, said, calls = config(tmp_path), [], []
    c.run_dir.mkdir()
    run = MlflowRun(c, mlflow, goes_on=False, say=said.append)
    run.write(1, {"a": 1.0, "odd <name>": math.nan})
    real = MlflowClient.log_batch

    def refusing(*arguments: object, **named: object) -> None:
        calls.append(named)
        raise MlflowException("no route")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", refusing)
        run.write(2, {"a": 2.0})
        run.write(3, {"a": 3.0})  # not tried
    assert len(calls) == 1 and MlflowClient.log_batch is real
    assert said[1:] == [like("MLflow does not take iteration 2; it is sent again later: no route")]
    assert json.loads((c.run_dir / "mlflow.json").read_text())["last"] == 1
    run.close()
    client = MlflowClient(tracking_uri=mlflow.tracking_uri)
    found = [(metric.step, metric.value) for metric in client.get_metric_history(run.name, "a")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0)]
    [odd] = client.get_metric_history(run.name, "odd _name_")
    assert math.isnan(odd.value) and said[2:] == []


def test_a_service_that_cannot_be_reached_is_told_at_the_start(mlflow: MlflowConfig, tmp_path: Path) -> None:
    c = config(tmp_path, mlflow={"experiment": "e", "tracking_uri": "nowhere://x"})
    with pytest.raises(EnvironmentProblem, match=r"metrics.mlflow: the run cannot be opened at nowhere://x: "):
        with record_run(c, 5, rank=0, decode=str):
            pass
