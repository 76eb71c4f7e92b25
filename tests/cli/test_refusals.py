"""All reasons why a run cannot begin are told at once, by plan and train alike."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli import train
from hybridflow.cli.refusals import note_missing
from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.errors import Reasons
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import ROOT, of_no_rank
from tests.test_fixed_config import tree as fixed_tree
from tests.tiny_models import make_checkpoints

pytestmark = pytest.mark.slow  # starts Python a few times


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("refusals") / "inputs")


def config(tmp_path: Path, inputs: Path, **changes: Any) -> Path:
    path = write_config(tmp_path / "config.yaml", inputs)
    tree = json.loads(path.read_text())
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section] = {**tree[section], name: value} if name else value
    path.write_text(json.dumps(tree))
    return path


def told(command: str, path: Path, *overrides: str) -> tuple[int, list[str]]:
    """Status, and the lines of the error without the name of the command."""
    words = [sys.executable, "-m", "hybridflow", command, str(path), *overrides]
    done = subprocess.run(words, cwd=ROOT, env=of_no_rank(), capture_output=True, text=True, timeout=600)
    prefix = {"train": "hybridflow: error: ", "plan": "hybridflow plan: error: "}[command]
    lines = done.stderr.splitlines()
    assert all(line.startswith(prefix) for line in lines), done.stderr
    return done.returncode, [line.removeprefix(prefix) for line in lines]


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["train", "plan"])
def test_models_files_and_functions(command: str, inputs: Path, tmp_path: Path) -> None:
    path = config(
        tmp_path,
        inputs,
        critic__model="nowhere",
        actor__tensor_parallel_size=3,
        data__train="absent.jsonl",
        reward={"functions": [{"function": "no_module:f"}, {"function": "hybridflow.rewards:no_function"}]},
    )
    status, lines = told(command, path)
    assert status == 1
    for part in (
        "nowhere/config.json: no such file",
        "actor.tensor_parallel_size = 3 does not divide",
        "data.train = absent.jsonl: no such file",
        "reward function no_module:f: cannot import no_module",
        "has no no_function",
    ):
        assert sum(part in line for line in lines) == 1, (part, lines)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_keys_and_files(command: str, inputs: Path, tmp_path: Path) -> None:
    """Of a config that does not hold, files are told all the same."""
    path = config(tmp_path, inputs, seed=-1, data__train="absent.jsonl", critic__model="nowhere")
    status, lines = told(command, path)
    assert status == 1
    assert [line.partition("config.yaml: ")[2] or line for line in lines] == [
        "seed = -1: input should be greater than or equal to 0",
        "critic.model = nowhere: no such directory",
        "data.train = absent.jsonl: no such file",
    ]


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_column_that_is_missing(command: str, inputs: Path, tmp_path: Path) -> None:
    status, lines = told(command, config(tmp_path, inputs, data__prompt_key="question"))
    assert status == 1 and len(lines) == 1
    assert "train.jsonl, line 1: has no key 'question' (data.prompt_key); its fields are prompt" in lines[0]
    assert "data.prompt_key=prompt, or data.columns" in lines[0]


def test_conversations_of_another_trainer_are_told_with_the_keys(tmp_path: Path) -> None:
    """ShareGPT's, in a run of SFT; and a file whose prompts have another name."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]}\n')
    sft = fixed_tree(data={"train": str(file), "batch_size": 2, "max_length": 9})
    found = Reasons()
    note_missing(FixedDataConfig.from_tree(sft, "x.yaml"), found)
    told_keys = "A conversation is data.columns.messages=conversations data.message_format=sharegpt"
    assert any(line.endswith(told_keys) for line in found.lines), found.lines


def test_a_row_that_nothing_can_score(inputs: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+2=", "answer": 3}\n{"prompt": "1+2=", "answer": null}\n')
    reward = {"functions": [{"function": "hybridflow.rewards:exact_match"}]}
    read = ExperimentConfig.from_yaml(config(tmp_path, inputs, data__train=str(file), reward=reward))
    reasons = Reasons()
    note_missing(read, reasons)
    assert len(reasons.lines) == 1 and "rows.jsonl, line 2: column 'answer': None is no answer" in reasons.lines[0]


def test_a_number_of_ranks_that_does_not_fit_is_told_with_one_that_does(inputs: Path, tmp_path: Path) -> None:
    path = config(tmp_path, inputs, actor__tensor_parallel_size=2)
    status, lines = told("train", path, "--nproc", "3")
    assert status == 1
    assert lines[0] == f"needs 2 ranks (or a multiple), got 3: hybridflow train {path} --nproc 2"


def test_sizes_alone_are_planned_and_not_trained() -> None:
    """Models of configs/shapes/ have no weights: what they will hold can be told all the same."""
    path = ROOT / "configs" / "llama3_8b_8gpus.yaml"
    words = [sys.executable, "-m", "hybridflow", "plan", str(path)]
    done = subprocess.run(words, cwd=ROOT, env=of_no_rank(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    said = done.stdout.partition("hybridflow train would refuse this config here:\n")[2]
    assert "no weights in configs/shapes/llama-3-8b, " in said and "data.train = " in said


# ------------------------------------------------------------------------------------------------ several hosts


def test_a_hostfile_makes_train_the_launcher(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2 slots=3\n")
    words = [sys.executable, "-m", "hybridflow", "train", "x.yaml", "--hostfile", str(hosts), "--resume", "never"]
    done = subprocess.run(words, cwd=ROOT, env=of_no_rank(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stderr.startswith("launch: error: ") and "slots is given twice" in done.stderr


def test_what_train_was_told_is_told_to_the_launcher() -> None:
    given = "--nnodes 2:3 x.yaml seed=3 --hostfile hosts --num-iterations 5 --resume auto --debug --replay runs/a"
    options = train._parser().parse_intermixed_args(given.split())
    launcher, _, ranks = " ".join(train._for_launcher(options)).partition(" -- ")
    assert launcher == "--hostfile hosts --nnodes 2:3 x.yaml seed=3 num_iterations=5 checkpoint.load=auto"
    assert ranks == "--debug --replay runs/a"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (("--nnodes", "2"), "--nnodes needs --hostfile, a file with a line a host: NAME slots=RANKS"),
        (("--hostfile", "hosts", "--nproc", "2"), "the slots of --hostfile say how many ranks each host has"),
    ],
)
def test_options_that_do_not_go_together(given: tuple[str, ...], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        train.main(["x.yaml", *given])
    assert raised.value.code == 2 and rule in capsys.readouterr().err


def test_heads_of_no_engine_are_told_by_plan(inputs: Path, tmp_path: Path) -> None:
    model = make_checkpoints(tmp_path, family="llama", tied=False, head_dim=16) / "policy"
    path = config(tmp_path, inputs, actor__model=str(model), critic__model=str(model), reference__model=str(model))
    status, lines = told("plan", path)
    assert status == 1 and lines[0].startswith(
        f"actor.model: {model} has heads of 16 (head_dim). vLLM generates on CPUs with heads of 32, 48, 64, 80"
    )


def test_a_search_for_gpus_asks_nothing_of_this_machines_engine(inputs: Path, tmp_path: Path) -> None:
    """Heads of 16 are those of no engine on CPUs, but go on GPUs."""
    model = make_checkpoints(tmp_path, family="llama", tied=False, head_dim=16) / "policy"
    path = config(tmp_path, inputs, actor__model=str(model), critic__model=str(model), reference__model=str(model))
    half = [f"{role}.dtype=bfloat16" for role in ("actor", "critic", "reference", "reward.models.0")]
    where = ["--search", "--gpus", "1", "--profile", "h100", "--minutes", "0.05", "--output", str(tmp_path / "b.yaml")]
    words = [sys.executable, "-m", "hybridflow", "plan", str(path), *half, *where]
    done = subprocess.run(words, cwd=ROOT, env=of_no_rank(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and (tmp_path / "b.yaml").is_file(), done.stderr
