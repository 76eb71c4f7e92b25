"""What runs the checks by itself: the workflow, and the script that it calls."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW, DOCS, WEEKLY = (ROOT / ".github" / "workflows" / f"{name}.yaml" for name in ("ci", "docs", "weekly"))


def workflow(file: Path = WORKFLOW) -> dict[Any, Any]:
    return yaml.safe_load(file.read_text())


def commands(job: str, file: Path = WORKFLOW) -> list[list[str]]:
    return [shlex.split(step["run"]) for step in workflow(file)["jobs"][job]["steps"] if "run" in step]


def test_the_workflow_runs_the_script_and_every_part_of_it() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert any(command[:2] == ["bash", ".ci/run"] for command in commands("checks"))
    first, *rest = workflow()["jobs"]["checks"]["strategy"]["matrix"]["part"]
    assert first == "default"
    assert rest == [f"rest --shard {part}/{len(rest)}" for part in range(1, len(rest) + 1)]


def test_the_workflow_installs_the_set_for_gpus() -> None:
    """It is not for .ci/run: it downloads another torch and compiles Transformer Engine."""
    assert commands("set-for-gpus")[1:4] == [
        ["bash", "launch/setup.sh", "--cuda"],
        [".venv/bin/hybridflow", "env"],
        [".venv/bin/python", "-m", "tests.constraints", "cuda", "check"],
    ]


def test_each_week_the_newer_megatron_is_tested_and_what_else_is_left_out() -> None:
    assert workflow(WEEKLY)[True].keys() == {"schedule", "workflow_dispatch"}
    assert workflow(WEEKLY)["permissions"] == {"contents": "read"}
    for job, part in (("newest", "newest"), ("products", "weekly")):
        assert commands(job, WEEKLY)[0] == ["bash", ".ci/run", part]


STUB = """\
#!/bin/sh
case "$*" in *--where*) echo newest ;; *) echo "$HYBRIDFLOW_PLATFORM|$*" ;; esac
"""


def called(root: Path, *arguments: str) -> list[str]:
    """What launch/test.sh calls: setup.sh, then the pytest of an environment, each with the platform that is set."""
    for name in ("launch/setup.sh", ".venv/bin/python", "newest/bin/python"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(STUB)
        (root / name).chmod(0o755)
    shutil.copy(ROOT / "launch" / "test.sh", root / "launch")
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "launch/test.sh", *arguments], cwd=root, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_second_environment_has_the_tests_of_what_stands_on_megatron(tmp_path: Path) -> None:
    set_up, ran = called(tmp_path, "--newest", "--python", "python9", "--durations=3")
    assert set_up == "cpu|--python python9 --newest"
    assert ran.startswith("cpu|-m pytest -n 3 --durations=3 --set default tests/")
    paths = [word for word in ran.split() if word.startswith("tests/")]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    wanted = {"models", "parallel", "checkpoint", "tools/convert", "rollout", "distributed"}
    assert {f"tests/{room}" for room in wanted} <= {*paths}
    assert called(tmp_path, "--newest", "tests/models", "-x")[1] == "cpu|-m pytest -n 3 tests/models -x"


def test_the_first_environment_is_as_ever(tmp_path: Path) -> None:
    assert called(tmp_path, "--fast", "-k", "x") == ["|", "|-m pytest -n 2 --set fast -k x"]


def test_the_workflow_reads_and_nothing_more() -> None:
    """On pull requests of strangers, too."""
    text = WORKFLOW.read_text()
    assert workflow()["permissions"] == {"contents": "read"}
    assert set(workflow()[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    assert "secrets" not in text
    uses = [step["uses"] for job in workflow()["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in uses)


def test_the_site_is_published_from_main_alone() -> None:
    """A pull request of a stranger builds it in the other workflow, which may write nothing."""
    found = workflow(DOCS)
    assert found[True] == {"push": {"branches": ["main"]}, "workflow_dispatch": None}
    assert found["permissions"] == {"contents": "read"}
    rights = {name: job.get("permissions") for name, job in found["jobs"].items()}
    assert rights == {"build": None, "publish": {"pages": "write", "id-token": "write"}}
    uses = [step["uses"] for job in found["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in uses)
    runs = [step.get("run", "") for step in found["jobs"]["build"]["steps"]]
    assert "mkdocs build --strict" in runs
