"""What runs the checks by itself: the workflow, the hooks of a commit, and the script that both lead to."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yaml"
HOOKS = ROOT / ".pre-commit-config.yaml"


def loaded(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def test_the_workflow_runs_the_script() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    [job] = loaded(WORKFLOW)["jobs"].values()
    [check] = [step for step in job["steps"] if step.get("run") == "bash .ci/run"]
    assert job["runs-on"].startswith("ubuntu-")
    assert 0 < check["timeout-minutes"] < job["timeout-minutes"] <= 120
    [python] = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert (python["python-version"], python["cache"]) == ("3.11", "pip")
    assert (ROOT / python["cache-dependency-path"]).is_file()


def test_the_workflow_reads_and_nothing_more() -> None:
    """On pull requests of strangers, too."""
    workflow = loaded(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    assert "secrets" not in WORKFLOW.read_text()
    uses = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in uses)


def test_the_script_checks_style_and_types_before_it_tests() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    checks = ("-m ruff check .", "-m ruff format --check .", "-m mypy")
    steps = ["bash launch/setup.sh", *(f".venv/bin/python {check}" for check in checks), "bash launch/test.sh"]
    assert [line for line in lines if line in steps] == steps
    assert lines[-1] == steps[-1] and "set -euo pipefail" in lines


def test_the_script_tests_what_is_optional_too() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [line] = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "--editable" in line]
    assert f'".[{",".join(sorted(extras.keys() - {"cpu", "cuda", "dev"}, reverse=True))}]"' in line


def test_the_script_skips_no_test_of_several_hosts_where_it_may_be_root() -> None:
    """Whoever is not root has them run by root, and the others by himself."""
    script = (ROOT / ".ci" / "run").read_text()
    by_root, by_sudo, by_neither = re.split(r"\n(?:elif|else)\b", script.partition("if ((EUID == 0)); then")[2])
    assert "export HYBRIDFLOW_MUST_RUN_HOSTS=1 HYBRIDFLOW_MUST_RUN_BROWSER=1" in by_root
    assert "export HYBRIDFLOW_MUST_RUN_BROWSER=1\n" in by_sudo and "MUST_RUN_BROWSER" not in by_neither
    assert re.search(r"sudo -n env HYBRIDFLOW_MUST_RUN_HOSTS=1 [^#]* -m distributed tests/launcher$", by_sudo)
    assert "HYBRIDFLOW_MUST_RUN_HOSTS" not in by_neither and "will be skipped" in by_neither


def test_types_are_checked_wherever_there_is_code() -> None:
    """No module of ours is left out or let off: what is excluded or overridden is the tests and other packages."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert (settings["files"], settings["exclude"], settings["strict"]) == (["."], ["^tests/"], True)
    assert {name for override in settings["overrides"] for name in override["module"]} == {
        *("megatron.*", "triton.*", "pyarrow.*", "math_verify.*", "wandb.*", "mlflow.*")
    }


def test_the_hooks_call_the_ruff_that_the_project_pins() -> None:
    repos = loaded(HOOKS)["repos"]
    [local] = [repo["hooks"] for repo in repos if repo["repo"] == "local"]
    entries = [hook["entry"] for hook in local]
    assert [entry.split()[:4] for entry in entries] == [
        [".venv/bin/python", "-m", "ruff", "check"],
        [".venv/bin/python", "-m", "ruff", "format"],
    ]
    assert all(hook["language"] == "system" for hook in local)
    others = [repo for repo in repos if repo["repo"] != "local"]
    assert all(re.fullmatch(r"v[\d.]+", repo["rev"]) for repo in others)
    assert {hook["id"] for repo in others for hook in repo["hooks"]} >= {"check-yaml", "end-of-file-fixer"}
