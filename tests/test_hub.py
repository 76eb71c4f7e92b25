"""Models and data sets by their name on the Hub: its cache, a server with its interface, and without network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.hub_server import hub
from tests.launch import ROOT, of_no_rank

pytestmark = pytest.mark.slow  # starts Python a few times

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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("some-org/tiny.policy", marks=pytest.mark.thorough),
        "some-org/tiny.policy@v1",
        pytest.param(f"some-org/tiny.policy@{SHA}", marks=pytest.mark.thorough),
    ],
)
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
    assert f"critic.model = {name}: is no local directory, and cannot be fetched from the HuggingFace" in done.stderr
    assert fetch in done.stderr


def test_what_lies_in_a_directory_that_is_here_is_no_name(home: Path, inputs: Path, tmp_path: Path) -> None:
    """A slip of the pen in a path is told as that, and nobody is asked."""
    path = write_config(tmp_path / "config.yaml", inputs)
    done = hybridflow(home, "plan", path, "actor.model=configs/policy")
    assert done.returncode == 1 and "configs/policy/config.json: no such file" in done.stderr


# ------------------------------------------------------------------------------------------------ data sets

SUMS = "{hub: some-org/sums, name: main, split: %s}"


@pytest.fixture(scope="module")
def data_sets(inputs: Path) -> Path:
    """Repositories of data sets: some-org/sums has a subset main with the splits train and test."""
    root = inputs.parent / "data_sets"
    sums = root / "some-org" / "sums"
    sums.mkdir(parents=True)
    (sums / "a.jsonl").write_bytes((inputs / "train.jsonl").read_bytes())
    (sums / "b.jsonl").write_bytes((inputs / "heldout.jsonl").read_bytes())
    splits = "".join(f"  - split: {split}\n    path: {file}.jsonl\n" for split, file in (("train", "a"), ("test", "b")))
    (sums / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")
    return root


def with_hub(home: Path, endpoint: str | None, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Without an endpoint the network is down, of which nobody has told the program."""
    env = of_no_rank(HF_HOME=str(home), HF_ENDPOINT=endpoint or "http://127.0.0.1:9", OMP_NUM_THREADS="1", **more)
    command = [sys.executable, "-m", "hybridflow", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def one_line_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_data_sets_are_fetched_once_and_read_without_network(data_sets: Path, tmp_path: Path) -> None:
    def looked_at(endpoint: str | None, **more: str) -> str:
        done = with_hub(tmp_path, endpoint, "data", SUMS % "test", **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with hub(data_sets) as endpoint:
        fetched = looked_at(endpoint)
        assert "5 rows" in fetched and "prompt" in fetched
    assert looked_at(None) == looked_at(None, HF_HUB_OFFLINE="1") == fetched


def test_a_revision_that_was_not_fetched_is_not_taken_from_another(data_sets: Path, tmp_path: Path) -> None:
    """`datasets` by itself takes the newest that is in its cache."""
    with hub(data_sets) as endpoint:
        assert with_hub(tmp_path, endpoint, "data", SUMS % "train").returncode == 0
        unknown = one_line_of(with_hub(tmp_path, endpoint, "data", "{hub: some-org/sums, split: train, revision: v7}"))
        assert "FILE = some-org/sums:train: cannot be fetched from the HuggingFace Hub: RevisionNotFound" in unknown
    told = one_line_of(with_hub(tmp_path, None, "data", "{hub: some-org/sums, split: train, revision: v1}"))
    assert "`hf download --repo-type dataset some-org/sums --revision v1 --local-dir DIR`" in told


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("{hub: some-org/sums}", "FILE: split = None: the name of one split is required, such as train"),
        ("{hub: some-org/sums, split: 'train[:10]'}", "FILE: split = 'train[:10]': the name of one split is"),
        ("{hub: a/b/c, split: train}", "FILE: hub = 'a/b/c': is no name of a data set, such as openai/gsm8k"),
        (
            "{hub: some-org/sums, splits: train}",
            "FILE: splits: unknown key; known are hub, name, split, revision, weight",
        ),
        (
            "{hub: tests/launcher, split: train}",
            "tests/launcher is here as a file or directory: name its files instead",
        ),
        ("some-org/sums", "some-org/sums: cannot be read: no such local file"),
    ],
)
def test_what_is_no_data_set(tmp_path: Path, given: str, rule: str) -> None:
    assert rule in one_line_of(with_hub(tmp_path, None, "data", given))


@pytest.mark.thorough
def test_a_plan_fetches_and_tells_all_reasons(data_sets: Path, inputs: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml", inputs)
    given = [f"data.train={SUMS % 'train'}", f"data.heldout={SUMS % 'validation'}", "data.prompt_key=question"]
    with hub(data_sets) as endpoint:
        told = with_hub(tmp_path, endpoint, "plan", path, *given).stderr
        assert "has no key 'question' (data.prompt_key); its fields are prompt, answer" in told
        assert "data.heldout = some-org/sums:main:validation: cannot be fetched" in told, told
        assert with_hub(tmp_path, endpoint, "plan", path, given[0]).returncode == 0
    named = with_hub(tmp_path, None, "plan", path, "data.train=some-org/sums")
    assert "no such file; a data set of the Hub is {hub: some-org/sums, split: train}" in named.stderr


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_run_reads_the_rows_that_their_files_have(data_sets: Path, inputs: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml", inputs)
    sources = f"[{SUMS % 'train'}]"
    evaluated = ["metrics.eval_interval=1", "metrics.eval_reward=hybridflow.rewards:math_equal"]
    given = {"hub": [f"data.train={sources}", f"data.heldout={SUMS % 'test'}", *evaluated]}
    given["files"] = [f"data.heldout={inputs / 'heldout.jsonl'}", *evaluated]
    found = {}
    with hub(data_sets) as endpoint:
        for name, overrides in given.items():
            done = with_hub(tmp_path, endpoint, "train", path, f"name={name}", *overrides)
            assert done.returncode == 0, done.stderr
            rows = [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
            found[name] = [(row["prompt"], row["response"], row["columns"]) for row in rows]
    assert found["hub"] == found["files"] and found["hub"]
