"""Models by their name on the Hub: from the layout of its cache, and what is said where there is no network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import ROOT, of_no_rank

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("hub") / "inputs")


@pytest.fixture(scope="module")
def home(inputs: Path) -> Path:
    """HF_HOME as huggingface_hub leaves it: files lie in blobs/, a snapshot links to them, refs/ names snapshots."""
    home = inputs.parent / "home"
    repository = home / "hub" / "models--some-org--tiny.policy"
    snapshot = repository / "snapshots" / SHA
    for directory in (repository / "blobs", repository / "refs", snapshot):
        directory.mkdir(parents=True)
    for number, file in enumerate(sorted((inputs / "policy").iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    for ref in ("main", "v1"):
        (repository / "refs" / ref).write_text(SHA)
    return home


def hybridflow(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    env = of_no_rank(HF_HOME=str(home), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "hybridflow", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", ["some-org/tiny.policy", "some-org/tiny.policy@v1", f"some-org/tiny.policy@{SHA}"])
def test_a_model_that_was_fetched_is_planned(home: Path, inputs: Path, tmp_path: Path, name: str) -> None:
    path = write_config(tmp_path / "config.yaml", inputs)
    done = hybridflow(home, "plan", path, f"actor.model={name}", f"reference.model={name}")
    assert done.returncode == 0, done.stderr
    assert f"snapshots/{SHA}" in done.stdout.replace("\n", "").replace(" ", "").replace("│", "")


@pytest.mark.thorough
@pytest.mark.distributed
def test_and_trained(home: Path, inputs: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml", inputs)
    name = "some-org/tiny.policy"
    more = [f"output_dir={tmp_path}", "name=x", "num_iterations=1"]
    done = hybridflow(home, "train", path, f"actor.model={name}", f"reference.model={name}", *more)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x" / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("name", ["some-org/other", "some-org/tiny.policy@v2"])
def test_without_network_it_is_said_what_to_fetch(
    home: Path, inputs: Path, tmp_path: Path, command: str, name: str
) -> None:
    path = write_config(tmp_path / "config.yaml", inputs)
    done = hybridflow(home, command, path, f"critic.model={name}")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    repository, _, revision = name.partition("@")
    fetch = f"`hf download {repository}{f' --revision {revision}' * bool(revision)} --local-dir DIR`"
    assert f"critic.model = {name}: is no directory here, and cannot be fetched from the HuggingFace" in done.stderr
    assert fetch in done.stderr


def test_what_lies_in_a_directory_that_is_here_is_no_name(home: Path, inputs: Path, tmp_path: Path) -> None:
    """A slip of the pen in a path is told as that, and nobody is asked."""
    path = write_config(tmp_path / "config.yaml", inputs)
    done = hybridflow(home, "plan", path, "actor.model=configs/policy")
    assert done.returncode == 1 and "configs/policy/config.json: no such file" in done.stderr
