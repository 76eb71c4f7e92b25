"""What runs the checks by itself: the workflow, and the script that it calls."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW, DOCS = (ROOT / ".github" / "workflows" / f"{name}.yaml" for name in ("ci", "docs"))


def workflow(file: Path = WORKFLOW) -> dict[Any, Any]:
    return yaml.safe_load(file.read_text())


def test_the_workflow_runs_the_script_and_every_part_of_it() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    job = workflow()["jobs"]["checks"]
    assert any(shlex.split(step.get("run", ""))[:2] == ["bash", ".ci/run"] for step in job["steps"])
    first, *rest = job["strategy"]["matrix"]["part"]
    assert first == "default"
    assert rest == [f"rest --shard {part}/{len(rest)}" for part in range(1, len(rest) + 1)]


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
