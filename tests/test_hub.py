"""Models and data sets by their name on the Hub: its cache, a server with its interface, and without network."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from hybridflow.architecture.spec import read_spec
from hybridflow.cli.chat import model_directory, whole_model
from hybridflow.cli.convert import main as convert
from hybridflow.cli.evaluate import evaluated_model
from hybridflow.config.hub import cached_directory, fetch_models, fetched
from hybridflow.config.lora import LoraConfig
from hybridflow.errors import ConfigError
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.hub_server import Hub, hub, whole_hub
from tests.launch import ROOT, of_no_rank

pytestmark = pytest.mark.slow  # starts Python a few times

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
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


# ------------------------------------------------------------------------------------------------ a Hub with models

BESIDE = ("README.md", ".gitattributes", "figure.png", "pytorch_model.bin", "consolidated.safetensors", "onnx/m.onnx")


@pytest.fixture(scope="module")
def models(inputs: Path) -> Path:
    """Repositories as people have them: a policy, a reward model and an adapter, with other files beside."""
    root = inputs.parent / "models"
    for name in ("policy", "reward"):
        shutil.copytree(inputs / name, root / "some-org" / name)
        for file in BESIDE:
            path = root / "some-org" / name / file
            path.parent.mkdir(exist_ok=True)
            path.write_text("of no use here")
    adapter = root / "some-org" / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "some-org/policy", "r": 1, "lora_alpha": 1}
    config |= {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    spec = read_spec(inputs / "policy")
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    a = torch.ones(1, spec.hidden_size)
    tensors = {}
    for i in range(spec.num_layers):
        at = layer.replace(".0.", f".{i}.")
        b = torch.full((spec.num_heads * spec.head_dim, 1), 0.5)
        tensors |= {f"{at}.lora_A.weight": a.clone(), f"{at}.lora_B.weight": b}
    save_file(tensors, adapter / "adapter_model.safetensors")
    return root


@pytest.fixture
def served(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, which huggingface_hub of this process asks, with an empty cache."""
    with whole_hub(models) as found:
        files = found.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield found


def test_what_hybridflow_reads_of_a_repository_is_fetched(served: Hub, inputs: Path) -> None:
    """And is found again: what else the repository has makes a snapshot no less complete."""
    assert cached_directory("some-org/policy") == "some-org/policy"
    small = Path(fetched("some-org/policy@v1", "actor.model", weights=False))
    assert cached_directory("some-org/policy@v1") == str(small) and not list(small.glob("*.safetensors"))
    directory = Path(fetched("some-org/policy", "actor.model"))
    assert cached_directory("some-org/policy") == str(directory) == str(small)
    there = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert there == {file.name: file.read_bytes() for file in (inputs / "policy").iterdir()}
    asked = len(served.asked)
    assert Path(fetched("some-org/policy", "actor.model")) == directory
    assert len(served.asked) == asked + 1, "only whether the revision is still the same"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("some-org/none", "RepositoryNotFoundError: no such repository, or a private one. Correct the name, or log"),
        (
            "some-org/policy@v2",
            "RevisionNotFoundError: 404 Client Error. .*Revision Not Found.* run `hf download",
        ),
        ("some-org/reward", "GatedRepoError: the repository is gated. Accept its terms on its page, then log in"),
    ],
)
def test_a_hub_that_says_no(served: Hub, name: str, rule: str) -> None:
    served.gated.add("some-org/reward")
    with pytest.raises(ConfigError, match=f"SRC = {name}: is no local directory, and cannot be fetched .*{rule}"):
        fetched(name, "SRC")


def test_a_connection_that_breaks(served: Hub) -> None:
    """What was not fetched is never taken for a model, and the next start fetches the rest."""
    served.cut = True
    with pytest.raises(ConfigError, match=r"actor.model = some-org/policy: .*cannot be fetched"):
        fetch_models({"actor": {"model": "some-org/policy"}}, weights=True)
    served.cut = False
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match=r"incomplete: 1 file\(s\) are missing \(model.safetensors\)"):
            fetched("some-org/policy", "actor.model")
    directory = Path(fetched("some-org/policy", "actor.model"))
    assert (directory / "model.safetensors").is_file()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert fetched("some-org/policy", "actor.model") == str(directory)


def test_half_a_revision(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has asked for config.json alone of a newer revision, which no listing tells of."""
    whole = Path(fetched("some-org/policy", "actor.model"))
    newer = whole.with_name(SHA)
    newer.mkdir()
    shutil.copy(whole / "config.json", newer)
    (whole.parents[1] / "refs" / "main").write_text(SHA)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rule = f"{SHA}, have no weights .*Another revision is here with weights: some-org/policy@{whole.name}"
    with pytest.raises(ConfigError, match=rule):
        fetched("some-org/policy", "actor.model")
    assert fetched(f"some-org/policy@{whole.name}", "actor.model") == str(whole)


def test_commands_take_names(served: Hub, inputs: Path, tmp_path: Path) -> None:
    """An adapter brings its base model along."""
    base = Path(fetched("some-org/policy", "SRC"))
    assert model_directory(Path("some-org/policy")) == base
    adapter = model_directory(Path("some-org/adapter"))
    with whole_model(adapter, None) as merged:
        query, before = (load_file(path / "model.safetensors")[Q_PROJ] for path in (merged, base))
        assert torch.equal(query, (before.float() + 0.5).to(before.dtype))
    assert evaluated_model("some-org/policy", None).model == "some-org/policy"
    found = evaluated_model("some-org/adapter", None)
    assert (found.model, found.adapter) == ("some-org/policy", str(adapter))
    tree = {"actor": {"model": "some-org/policy", "lora": {"adapter_path": "some-org/adapter"}}}
    fetch_models(tree, weights=True)
    assert LoraConfig(adapter_path="some-org/adapter").adapter_path == str(adapter)
    assert convert(["hf-to-megatron", "some-org/policy", str(tmp_path / "megatron")]) == 0
    assert convert(["verify", "some-org/policy", str(tmp_path / "megatron")]) == 0


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_run_of_names_equals_that_of_directories(models: Path, inputs: Path, tmp_path: Path) -> None:
    """The config says which Hub and which cache, before anything is fetched."""
    rows = {}
    with hub(models) as endpoint:
        for name, place in (("names", "some-org"), ("directories", inputs)):
            path = write_config(tmp_path / "config.yaml", inputs)
            given = [f"{key}.model={place}/policy" for key in ("actor", "reference")]
            given += [f"reward.models.0.model={place}/reward", f"name={name}", "num_iterations=1"]
            given.append(f"env_vars={{HF_ENDPOINT: '{endpoint}', HF_HOME: '{tmp_path / 'home'}'}}")
            command = [sys.executable, "-m", "hybridflow", "train", str(path), *given]
            env = of_no_rank(OMP_NUM_THREADS="1")
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            with (tmp_path / name / "metrics.csv").open() as file:
                rows[name] = {key: value for key, value in next(csv.DictReader(file)).items() if "loss" in key}
    assert rows["names"] == rows["directories"] and rows["names"]


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


@pytest.mark.thorough
def test_data_sets_are_fetched_once_and_read_without_network(data_sets: Path, tmp_path: Path) -> None:
    def looked_at(endpoint: str | None, **more: str) -> str:
        done = with_hub(tmp_path, endpoint, "data", SUMS % "test", **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with hub(data_sets) as endpoint:
        fetched = looked_at(endpoint)
        assert "5 rows" in fetched and "prompt" in fetched
    assert looked_at(None) == looked_at(None, HF_HUB_OFFLINE="1") == fetched


@pytest.mark.thorough
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
