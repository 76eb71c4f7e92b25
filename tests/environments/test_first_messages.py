"""How rows begin: asked once for all ranks, and looked at before a run by the commands that check a config."""

import json
from pathlib import Path

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.data.environment import check_environment
from hybridflow.errors import ConfigError
from hybridflow.inspection.inputs import input_findings
from tests.cli.test_refusals import told
from tests.environments.rollouts_worker import USERS, named
from tests.environments.tiny_chat import TEMPLATE, make_chat_inputs
from tests.launch import run_ranks

NUM_PROMPTS, NUM_SAMPLES, NUM_ITERATIONS = 4, 2, 2
LOOKED_AT = 1 + 3  # for the names of the columns, and for what a run tells of its first rows


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("first"))
    tree = {
        "name": "run",
        "output_dir": str(root),
        "num_iterations": NUM_ITERATIONS,
        "data": {
            "train": str(root / "train.jsonl"),
            "chat_template": True,
            "prompts_per_iteration": NUM_PROMPTS,
            "max_prompt_length": 32,
        },
        "sampling": {"samples_per_prompt": NUM_SAMPLES, "max_response_length": 32},
        "actor": {"model": str(root / "policy"), "dtype": "float32", "optimizer": {"lr": 1e-3}},
        "rollout": {"kv_cache_gib": 0.0625},
        "algorithm": {"name": "rloo", "kl": {"use": "none"}},
        "metrics": {"tensorboard": False},
        "checkpoint": {"load": "none"},
    }
    (root / "config.yaml").write_text(json.dumps(tree))
    return root / "config.yaml"


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_row_that_is_drawn_begins_once_however_many_ranks_there_are(num_ranks: int, config: Path) -> None:
    """And once more for each row of the rollout, on the rank that leads the engine. The next draw begins ahead."""
    noted = config.parent / f"started_{num_ranks}"
    environment = named("Noted", arguments={"file": str(noted)}, max_turns=1, max_turn_tokens=4)
    run_ranks(num_ranks, "hybridflow.train", config, environment, f"name=on_{num_ranks}")
    drawn = LOOKED_AT + (NUM_ITERATIONS + 1) * NUM_PROMPTS
    assert len(noted.read_text().splitlines()) == drawn + NUM_ITERATIONS * NUM_PROMPTS * NUM_SAMPLES


@pytest.mark.distributed
@pytest.mark.thorough
def test_ranks_with_other_files_do_not_wait_for_each_other(config: Path) -> None:
    (config.parent / "other.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    done = run_ranks(2, "tests.environments.other_files_worker", config, named("Talk"), check=False)
    assert "data.train differs between ranks: rank 1 has" in done.stdout + done.stderr


def read(config: Path, *overrides: str) -> ExperimentConfig:
    return ExperimentConfig.from_yaml(config, list(overrides))


WRONG = {
    "WithoutStep": "has no method step(self, said), which every environment needs",
    "WithoutTypes": "the tool add has no schema: Argument a is missing a type hint",
    "Nobody": "has no Nobody",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_class_is_refused_before_a_run(name: str, config: Path) -> None:
    given = read(config, named(name))
    with pytest.raises(ConfigError) as refused:
        check_environment(given)
    findings = {finding.name: finding for finding in input_findings(given, "a")[0]}
    finding = findings[f"data.environment.class = {USERS}:{name}"]
    assert finding.status == "fail"
    assert WRONG[name] in finding.value and finding.value == str(refused.value)


@pytest.mark.slow
def test_a_template_that_reads_no_tools_is_refused_before_a_run(config: Path, tmp_path: Path) -> None:
    root = make_chat_inputs(tmp_path, template=TEMPLATE.replace("tools", "nothing"))
    with pytest.raises(ConfigError, match="has tools, which the tokenizer's chat template does not read"):
        check_environment(read(config, named("Talk"), f"actor.model={root / 'policy'}"))


def test_a_class_that_is_there_has_tools_and_a_digest(config: Path) -> None:
    findings, digests = input_findings(read(config, named("Talk")), "a")
    told = {finding.name: (finding.status, finding.value) for finding in findings}
    assert told[f"data.environment.class = {USERS}:Talk"] == ("ok", "can be imported, tools: add, fails")
    assert f"the file of {USERS}" in digests


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["plan", "train"])
def test_plan_and_train_tell_of_the_class_with_all_else(command: str, config: Path) -> None:
    status, lines = told(command, config, named("WithoutStep"), "data.train=absent.jsonl")
    assert status == 1
    assert any("absent.jsonl: no such file" in line for line in lines)
    assert any(WRONG["WithoutStep"] in line for line in lines)
