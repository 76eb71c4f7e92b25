"""`hybridflow.health`: alone, as two hosts by torchrun, and as four hosts of which one has other files or is silent."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli import health
from hybridflow.config import read_tree
from hybridflow.inspection import participant
from hybridflow.inspection.findings import HealthReport
from hybridflow.parallel.host_memory import LEAST_MEMORY
from hybridflow.placement.forecast import fullest
from hybridflow.placement.placed import place
from hybridflow.trainers.auto import resolved_for
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.inspection.health_worker import NAMES
from tests.launch import finish, free_port, run_ranks, start_torchrun
from tests.messages import like

ALONE = "actor.tensor_parallel_size=1"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("health") / "inputs")


@pytest.fixture
def config(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDFLOW_HOST", "here")
    return write_config(tmp_path / "config.yaml", inputs)


def failing(report: HealthReport) -> list[tuple[str, str, str]]:
    """Without links that were slow: a busy machine may make them so."""
    failed = [f for f in report.findings if f.status == "fail" and not f.advice.startswith("slow")]
    return [(f.area, f.name, f.host) for f in failed]


# ------------------------------------------------------------------------------------------------ alone


def test_all_is_well(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.iterdir())
    file = tmp_path / "health.json"
    assert health.main([str(config), ALONE, "--json", str(file)]) == 0
    out, _ = capsys.readouterr()
    assert "hybridflow 0.1.0: 1 rank on 1 host, CPU" in out and "vLLM CPU_ATTN" in out
    assert out.splitlines()[-1].startswith("ok: 0 failing") or "warning" in out.splitlines()[-1]
    tree = json.loads(file.read_text())
    assert (tree["world_size"], tree["hosts"]) == (1, [{"name": "here", "node": 0, "ranks": [0]}])
    assert tree["is_flash_attn_available"] is False
    assert tree["attention"] == {"training": "torch scaled_dot_product_attention", "rollout": "vLLM CPU_ATTN"}
    areas = list(dict.fromkeys(finding["area"] for finding in tree["findings"]))
    assert areas == ["machine", "packages", "attention", "storage", "inputs", "plan"]
    assert sorted(tmp_path.iterdir()) == sorted([*before, file])


def test_json_alone_on_stdout(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    status = health.main(["--json", "-"])
    tree = json.loads(capsys.readouterr().out)
    assert tree["status"] in ("ok", "warn") and status == 0
    assert f"free in {tmp_path}" in next(f["value"] for f in tree["findings"] if f["name"] == "free space")


def test_json_that_cannot_be_written(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert health.main(["--json", "absent/health.json"]) == 1
    error = capsys.readouterr().err
    assert error == (
        like("hybridflow.health: error: --json absent/health.json: cannot be written: No such file or directory\n")
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "reference.model={tmp}/absent",
            "fail: inputs, model of reference, here: {tmp}/absent/config.json: no such file; a model is a HuggingFace "
            "directory. make it readable on that host under this very path: a shared file system, or a copy of the "
            "same files.",
        ),
        (
            "data.train={tmp}/absent.jsonl",
            "fail: inputs, data.train, here: {tmp}/absent.jsonl: cannot be read: no such local file. make it readable",
        ),
        (
            "output_dir={tmp}/config.yaml/runs",
            "fail: storage, output directory, here: output_dir = {tmp}/config.yaml/runs: cannot write to "
            "{tmp}/config.yaml/runs: Not a directory. make {tmp}/config.yaml/runs a directory that this user can",
        ),
        (
            "rollout.kv_cache_gib=100000",
            "fail: plan, memory, here: 1 rank there will hold 100,000.",
        ),
        (
            "actor.tensor_parallel_size=2",
            "fail: plan, layout, all: ",
        ),
        ("actor.lr=1", "fail: inputs, config, here: {tmp}/config.yaml: actor.lr: unknown key"),
    ],
)
def test_what_fails_has_status_1_and_says_what_to_do(
    override: str, line: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert health.main([str(config), ALONE, override.format(tmp=tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = [text for text in lines if text.startswith(line.format(tmp=tmp_path))]
    assert found, "\n".join(text for text in lines if text.startswith(("fail", "warn")))
    assert lines[-1].startswith("fail: ")


def test_from_python_it_is_the_same_and_may_be_called_again(config: Path) -> None:
    report = health.run(config, [ALONE, "rollout.kv_cache_gib=100000"])
    assert (failing(report), report.exit_code) == ([("plan", "memory", "here")], 1)
    [found] = [f for f in report.findings if f.status == "fail"]
    assert "rollout.kv_cache_gib" in found.advice
    assert found.figures["needed_bytes"] > 100_000 << 30
    assert failing(health.run(config, [ALONE])) == []
    assert HealthReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report


AUTO = ("actor.tensor_parallel_size=auto", "actor.micro_batch_tokens=auto", "rollout.kv_cache_gib=auto")


def test_auto_is_chosen_before_the_config_is_looked_at(config: Path) -> None:
    report = health.run(config, AUTO)
    assert failing(report) == []
    needed = next(f for f in report.findings if (f.area, f.name) == ("plan", "memory")).figures["needed_bytes"]
    chosen, lines = resolved_for(read_tree(config, AUTO), config, 1)
    assert chosen.rollout.kv_cache_gib > 0 and any(line.endswith("(auto)") for line in lines)
    assert needed == fullest(place(chosen, 1)).bytes
    given = health.run(config, [ALONE, "rollout.kv_cache_gib=7"])
    assert next(f for f in given.findings if f.name == "memory" and f.area == "plan").figures["needed_bytes"] > needed


def test_where_no_choice_fits_that_is_a_line_of_the_host(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participant, "memory_here", lambda ranks: LEAST_MEMORY + 1000)
    [found] = [f for f in health.run(config, AUTO).findings if f.status == "fail"]
    assert (found.area, found.name, found.host) == ("inputs", "config", "here")
    assert "no layout fits on 1 rank of a CPU" in found.value and "the least is" in found.value


# ------------------------------------------------------------------------------------------------ several


@pytest.mark.distributed
@pytest.mark.thorough
def test_two_hosts_by_torchrun(inputs: Path, tmp_path: Path) -> None:
    """One of them has another name for the output directory's parent: a file. Both end with 1, one of them prints."""
    config = write_config(tmp_path / "config.yaml", inputs)
    (tmp_path / "node-a").mkdir()
    (tmp_path / "node-b").touch()
    port, agents = free_port(), []
    for node, name in enumerate(("node-a", "node-b")):
        where = ["--nnodes", 2, "--node-rank", node, "--master-port", port]
        arguments = [config, f"output_dir={tmp_path / name}", "tensor_parallel_across_hosts=true"]
        arguments += ["--json", tmp_path / "health.json"]
        own = {"HYBRIDFLOW_HOST": name}
        agents.append(start_torchrun(1, *where, "-m", "hybridflow.health", *arguments, environment=own))
    done = [finish(agent, 300) for agent in agents]
    assert [one.returncode for one in done] == [1, 1]
    assert ["hybridflow 0.1.0: 2 ranks on 2 hosts, CPU" in one.stdout for one in done] == [True, False]
    report = HealthReport.from_dict(json.loads((tmp_path / "health.json").read_text()))
    assert [(host.name, host.ranks) for host in report.hosts] == [("node-a", (0,)), ("node-b", (1,))]
    assert failing(report) == [("storage", "output directory", "node-b"), ("inputs", "the config", "node-b")]
    links = [f for f in report.findings if f.area == "links between hosts"]
    assert [(f.name, f.host) for f in links] == [
        ("link", "node-a - node-b"),
        ("all-reduce", "the first ranks of all hosts"),
    ]
    assert links[0].figures["bytes_per_second"] > 20e6
    clocks = {f.host: f.figures["seconds_ahead"] for f in report.findings if f.area == "clocks"}
    assert list(clocks) == ["node-a", "node-b"] and all(abs(ahead) < 0.05 for ahead in clocks.values())
    assert "fail: storage, output directory, node-b" in done[0].stdout


@pytest.fixture(scope="module")
def four_hosts(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """node-c lacks a model and has other prompts; node-d has no config."""
    directory = tmp_path_factory.mktemp("hosts")
    for name in NAMES:
        shutil.copytree(inputs, directory / name / "inputs")
        write_config(directory / name / "config.yaml", Path("inputs"))
        text = (directory / name / "config.yaml").read_text().replace(f'"{directory / name}"', '"runs"')
        (directory / name / "config.yaml").write_text(text)
    shutil.rmtree(directory / "node-c" / "inputs" / "reference")
    with (directory / "node-c" / "inputs" / "train.jsonl").open("a") as file:
        file.write('{"prompt": "1+1=", "answer": "2"}\n')
    (directory / "node-d" / "config.yaml").unlink()
    run_ranks(8, "tests.inspection.health_worker", directory)
    return directory


def reports(directory: Path, name: str) -> list[HealthReport]:
    """By rank."""
    return [HealthReport.from_dict(json.loads(f.read_text())) for f in sorted(directory.glob(f"{name}.*.json"))]


@pytest.mark.distributed
@pytest.mark.thorough
def test_a_host_with_other_files_is_named(four_hosts: Path) -> None:
    first, *others = reports(four_hosts, "inputs")
    assert others == [first] * 7
    assert [host.name for host in first.hosts] == list(NAMES)
    assert [host.ranks for host in first.hosts] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert failing(first) == [
        ("inputs", "model of reference", "node-c"),
        ("inputs", "config", "node-d"),
        ("inputs", "data.train", "node-c"),
    ]
    [absent] = [f for f in first.findings if f.name == "model of reference" and f.host == "node-c"]
    assert absent.value == like("inputs/reference/config.json: no such file; a model is a HuggingFace directory")
    [other] = [f for f in first.findings if f.name == "data.train" and f.status == "fail"]
    assert ", but node-a, node-b have " in other.value and "the same on all hosts" in other.advice
    [layout] = [f for f in first.findings if (f.area, f.name) == ("plan", "layout")]
    assert layout.value.startswith("8 ranks: actor on 0-7")


@pytest.mark.thorough
@pytest.mark.distributed
def test_every_link_is_measured(four_hosts: Path) -> None:
    report = reports(four_hosts, "inputs")[0]
    between = [f for f in report.findings if f.area == "links between hosts"]
    links = {f.host for f in between if f.name == "link"}
    assert links == {f"{one} - {other}" for i, one in enumerate(NAMES) for other in NAMES[i + 1 :]}
    assert [f.host for f in between if f.name == "all-reduce"] == ["the first ranks of all hosts", "all ranks"]
    inside = [f for f in report.findings if f.area == "links inside a host"]
    assert [f.host for f in inside if f.name == "link"] == [
        f"rank {rank} on {name} - rank {rank + 1} on {name}" for rank, name in zip(range(0, 8, 2), NAMES, strict=True)
    ]
    assert [f.host for f in inside if f.name == "all-reduce"] == list(NAMES)
    for finding in (*between, *inside):
        assert finding.status == "ok" or finding.advice.startswith("slow"), finding
    assert [f.host for f in report.findings if f.area == "clocks"] == list(NAMES)


@pytest.mark.thorough
@pytest.mark.distributed
def test_every_group_of_the_run_is_made(four_hosts: Path) -> None:
    """The actor has tp 2 and dp 4, the critic dp 8; all ranks are one group of several roles, but not of the world."""
    found = [f for f in reports(four_hosts, "inputs")[0].findings if f.area == "groups"]
    assert [f.name for f in found] == ["0-7", "0-1, ...", "0,2,4,6, ...", "0-7", "0-1, ..."]
    assert [f.value.partition(":")[0] for f in found][1:3] == ["4 of 2 ranks", "2 of 4 ranks"]
    assert all(f.figures["bytes"] is None and 0 < f.figures["seconds"] < 60 for f in found)


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_rank_that_answers_late_is_named_and_learns_the_result(four_hosts: Path) -> None:
    first, *others = reports(four_hosts, "late")
    assert others == [first] * 7
    [silent] = [f for f in first.findings if f.area == "hosts"]
    assert (silent.host, silent.value) == ("node-b", "ranks 3 are silent: looking at machine")
    assert failing(first) == [("hosts", "answer", "node-b")]


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_rank_that_never_comes_is_named_by_its_host(four_hosts: Path) -> None:
    first, *others = reports(four_hosts, "absent")
    assert others == [first] * 6
    [silent] = [f for f in first.findings if f.area == "hosts"]
    assert (silent.host, silent.value) == ("node-c", "ranks 5 are silent: has not started")
    assert first.exit_code == 1
    links = [f for f in first.findings if (f.area, f.name) == ("links between hosts", "link")]
    assert len(links) == 6  # by the ranks that are there
