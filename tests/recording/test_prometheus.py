"""The text that Prometheus reads, fetched from a run."""

import socket
import urllib.request
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from hybridflow.errors import EnvironmentProblem
from hybridflow.recording.prometheus import prometheus_text
from hybridflow.recording.recorder import record_run
from tests.launch import free_port
from tests.recording.test_resume import config, record


def test_names_labels_and_numbers_are_as_the_format_wants_them() -> None:
    values = {"actor/clip-fraction": 0.25, "a/b": float("nan"), "c": float("inf"), "d": float("-inf"), "e": 1e-7}
    assert prometheus_text('a"b\\c\nd', values).splitlines()[:4] == [
        "# TYPE hybridflow_actor_clip_fraction gauge",
        r'hybridflow_actor_clip_fraction{run="a\"b\\c\nd"} 0.25',
        "# TYPE hybridflow_a_b gauge",
        r'hybridflow_a_b{run="a\"b\\c\nd"} NaN',
    ]
    found = [line.rpartition(" ")[2] for line in prometheus_text("r", values).splitlines()[1::2]]
    assert found == ["0.25", "NaN", "+Inf", "-Inf", "1e-07"]


def test_names_that_become_alike_stand_once() -> None:
    assert prometheus_text("r", {"a/b": 1.0, "a_b": 2.0}).count("# TYPE hybridflow_a_b gauge") == 1


def test_the_last_iteration_is_served_until_the_run_ends(tmp_path: Path) -> None:
    port = free_port()
    c, url = config(tmp_path, prometheus_port=port, dump_batches=False), f"http://127.0.0.1:{port}/metrics"
    with record_run(c, 5, rank=0, decode=str) as recorder:
        assert fetched(url) == ""
        for last in range(1, 3):
            record(recorder, range(last, last + 1))
            lines = fetched(url).splitlines()
            assert 'hybridflow_iteration{run="run"} ' + f"{last}.0" in lines
            assert f'hybridflow_reward_score_mean{{run="run"}} {last / 3!r}' in lines
        with pytest.raises(HTTPError, match="404"):
            fetched(url.replace("metrics", "config"))
    with pytest.raises(URLError):
        fetched(url)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        c = config(tmp_path, prometheus_port=port)
        with pytest.raises(EnvironmentProblem, match=f"metrics.prometheus_port = {port}: .* on 127.0.0.1: .*in use"):
            with record_run(c, 5, rank=0, decode=str):
                raise AssertionError("not reached")


def fetched(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()
