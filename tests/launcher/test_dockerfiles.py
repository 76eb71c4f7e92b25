"""The Dockerfiles and .dockerignore: what docker would refuse, found by a small parser where there is no Docker."""

import json
import re
import shlex
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
INSTRUCTIONS = {"FROM", "RUN", "CMD", "ENTRYPOINT", "COPY", "ENV", "ARG", "USER", "WORKDIR", "LABEL"}


def instructions(text: str) -> list[tuple[str, str]]:
    """Of a Dockerfile, with what follows them, continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def mistakes(text: str, root: Path) -> list[str]:
    """What docker would refuse, or what would be another image tomorrow."""
    found, parsed = [], instructions(text)
    if parsed[0][0] not in ("FROM", "ARG"):
        found.append("begins without FROM")
    for word, rest in parsed:
        if word not in INSTRUCTIONS:
            found.append(f"{word}: no instruction")
        elif word == "FROM" and (":" not in rest or rest.split(":")[1].split()[0] == "latest"):
            found.append(f"FROM {rest}: no release")
        elif word == "COPY":
            found += [f"COPY {source}: not sent" for source in shlex.split(rest)[:-1] if not is_sent(source, root)]
        elif word in ("CMD", "ENTRYPOINT") and not is_json_form(rest):
            found.append(f"{word} {rest}: a shell would get its signals")
        elif word == "RUN" and subprocess.run(["bash", "-n", "-c", rest], capture_output=True).returncode:
            found.append(f"RUN {rest}: no shell command")
    return found


def is_json_form(text: str) -> bool:
    try:
        words = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


def is_sent(path: str, root: Path) -> bool:
    """Whether it is there and .dockerignore leaves it in."""
    return (root / path).exists() and not is_ignored(Path(path), (root / ".dockerignore").read_text())


def is_ignored(path: Path, patterns: str) -> bool:
    """By the two kinds of patterns that we use: NAME, of the root alone, and **/NAME, of every folder."""
    for pattern in (line for line in patterns.splitlines() if line and not line.startswith("#")):
        anywhere = pattern.removeprefix("**/")
        assert not set("/!") & set(anywhere), f".dockerignore: {pattern}: of a kind that this test does not know"
        parts = path.parts if anywhere != pattern else path.parts[:1]
        if any(fnmatchcase(part, anywhere) for part in parts):
            return True
    return False


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_has_nothing_that_docker_would_refuse(name: str) -> None:
    assert mistakes((ROOT / "launch" / name).read_text(), ROOT) == []


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("FROM python", "FROM python: no release"),
        ("FROM python:latest AS base", "FROM python:latest AS base: no release"),
        ("INSTALL x", "INSTALL: no instruction"),
        ("COPY pyproject.toml nowhere.txt ./", "COPY nowhere.txt: not sent"),
        ("COPY .git ./", "COPY .git: not sent"),
        ("CMD python x.py", "CMD python x.py: a shell would get its signals"),
        ('ENTRYPOINT ["a", 1]', 'ENTRYPOINT ["a", 1]: a shell would get its signals'),
        ("RUN (true \\\n    && false", "RUN (true && false: no shell command"),
    ],
)
def test_a_mistake_in_a_dockerfile_is_found(line: str, mistake: str) -> None:
    assert mistakes(f"FROM python:3.11-slim\n{line}\n", ROOT) == [mistake]


def test_every_file_of_the_repository_is_sent_to_docker() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"not a checkout: {listed.stderr.strip()}")
    patterns = (ROOT / ".dockerignore").read_text()
    assert len(listed.stdout.splitlines()) > 100
    assert not [name for name in listed.stdout.splitlines() if is_ignored(Path(name), patterns)]
    for name in (
        ".git/config",
        ".venv/bin/python",
        "runs/x/y",
        "data/tiny/a",
        "a/__pycache__/b.pyc",
        "x.egg-info/a",
        "hybridflow-7.out",
    ):
        assert is_ignored(Path(name), patterns), name


def test_the_output_of_slurm_jobs_is_no_file_of_the_repository() -> None:
    ignored = subprocess.run(["git", "check-ignore", "hybridflow-7.out"], cwd=ROOT, capture_output=True, text=True)
    if ignored.returncode == 128:
        pytest.skip(f"not a checkout: {ignored.stderr.strip()}")
    assert ignored.stdout == "hybridflow-7.out\n"
