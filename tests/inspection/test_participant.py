"""What a rank answers: also where a look hangs, raises or prints, and where there is no config or no such device."""

import time
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from hybridflow.inspection import participant as module
from hybridflow.inspection.findings import Finding
from hybridflow.inspection.participant import Participant, first_line
from hybridflow.parallel.process_exit import still_busy
from hybridflow.parallel.torchrun import Started

ORDER = {"act": "look", "host": "a", "num_ranks": 1, "first": True}


def a_rank(config: Any = None, *overrides: str, store: HashStore | None = None) -> Participant:
    return Participant(store or HashStore(), Started(0, 1, 0, 1, 0), config, overrides)


def look(participant: Participant) -> dict[str, list[Finding]]:
    findings: dict[str, list[Finding]] = {}
    for tree in participant.perform(ORDER)["findings"]:
        findings.setdefault(tree["area"], []).append(Finding(**tree))
    return findings


def test_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_HOST", "node-a")
    assert a_rank().perform({"act": "greet"}) == {"host": "node-a", "node": 0}


def test_a_look_that_hangs_costs_its_own_area_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AREA_SECONDS", 0.3)
    monkeypatch.setattr(module, "storage_findings", lambda *_: time.sleep(5))
    monkeypatch.setattr(module, "version_findings", lambda *_, **__: [Finding("packages", "torch", "a", "2")])
    found = look(a_rank())
    [hung] = found["storage"]
    assert (hung.status, hung.value) == ("fail", "no answer within 0 s")
    assert "does not answer" in hung.advice
    assert [finding.status for finding in found["packages"]] == ["ok"]


def test_a_look_that_raises_costs_its_own_area_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> list[Finding]:
        raise ValueError("broken\nin many lines")

    monkeypatch.setattr(module, "version_findings", broken)
    monkeypatch.setattr(module, "storage_findings", lambda *_: [])
    found = look(a_rank())
    assert [(finding.status, finding.value) for finding in found["packages"]] == [("fail", "ValueError: broken")]
    assert {finding.status for finding in found["attention"]} == {"ok"}


def test_what_a_look_prints_is_no_part_of_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "storage_findings", lambda *_: print("a user's module") or [])
    look(a_rank())
    out, error = capsys.readouterr()
    assert (out, "a user's module" in error) == ("", True)


def test_a_config_that_cannot_be_read_is_a_line_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "storage_findings", lambda *_: [])
    [found] = look(a_rank(tmp_path / "absent.yaml"))["inputs"]
    assert (found.name, found.status) == ("config", "fail")
    assert found.value == f"{tmp_path}/absent.yaml: cannot be read: No such file or directory"


def test_a_device_that_is_not_there_is_a_line_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(platform: str) -> None:
        raise module.EnvironmentProblem("platform: auto: torch, built for CUDA 13.0, sees no CUDA device: no driver")

    monkeypatch.setattr(module, "choose_platform", none)
    participant = a_rank()
    answer = participant.perform({**ORDER, "first": False})
    [found] = [Finding(**tree) for tree in answer["findings"]]
    assert (found.name, found.status) == ("devices", "fail")
    assert found.value.endswith("no driver") and "nvidia-smi" in found.advice
    assert answer["facts"] == {}


def test_the_other_ranks_of_a_host_tell_their_device_alone() -> None:
    answer = a_rank().perform({**ORDER, "first": False})
    assert (answer["findings"], list(answer["facts"])) == ([], ["device"])
    assert answer["facts"]["device"]["name"] == "CPU"


def test_errors_of_links_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(group: object) -> None:
        raise RuntimeError("[/build/gloo/transport/tcp/pair.cc:78] Timed out waiting 10000ms for recv operation\nmore")

    monkeypatch.setattr(module, "StandaloneGroup", lambda *_, **names: type("Group", (), names))
    monkeypatch.setattr(module, "lead_link", dead)
    answer = a_rank().perform({"act": "link", "ranks": [0, 1], "group": "1"})
    assert answer == {"error": "RuntimeError: Timed out waiting 10000ms for recv operation"}


def test_a_link_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: object, **__: object) -> None:
        time.sleep(5)
        raise RuntimeError("given up by itself")

    monkeypatch.setattr(module, "StandaloneGroup", stuck)
    monkeypatch.setattr(module, "MEASURE_SECONDS", 0.3)
    start = time.monotonic()
    assert a_rank().perform({"act": "all_reduce", "ranks": [0, 1], "group": "1"}) == {"error": "no end after 0.3 s"}
    assert time.monotonic() - start < 4.5 and still_busy()


def test_what_a_rank_is_doing_stands_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen = HashStore(), []
    monkeypatch.setattr(module, "storage_findings", lambda *_: seen.append(store.get("doing/0")) or [])
    look(a_rank(store=store))
    assert seen == [b"looking at storage"]


def test_first_line() -> None:
    assert first_line(OSError(5, "Input/output error")) == "OSError: [Errno 5] Input/output error"
    assert first_line(ValueError()) == "ValueError: "
