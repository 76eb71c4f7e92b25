"""Expected lengths in searches and plans, and values that a search replaces."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.automap.timing import work_of
from hybridflow.cli.plan import main
from hybridflow.cli.plan_search import FIRST_SHARE
from hybridflow.config import ExperimentConfig
from hybridflow.config.kinds import load_config
from hybridflow.errors import ConfigError
from hybridflow.placement.placed import place
from tests.automap.round_profile import profile
from tests.automap.test_search import DEVICE, GRPO
from tests.test_plan import CONFIG, SMALL

SEARCH = ("--search", "--gpus", "2", "--profile", "device.json", "--memory-gib", "5", "--minutes", "0.2")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the model's config.json, grpo.yaml with responses of 40 tokens, and device.json."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(SMALL))
    tree: dict[str, Any] = copy.deepcopy(CONFIG | GRPO)
    tree["sampling"]["max_response_length"] = 40
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "device.json").write_text(DEVICE.model_dump_json())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(*overrides: str) -> ExperimentConfig:
    config = load_config("grpo.yaml", list(overrides))
    assert isinstance(config, ExperimentConfig)
    return config


def best(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, Any]]:
    """What the search prints, and its config."""
    assert main(["grpo.yaml", *SEARCH, *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out, yaml.safe_load(Path("best.yaml").read_text())


def test_the_work_has_the_mean_and_the_longest() -> None:
    work = work_of(config_of("sampling.expected_response_length=10"), profile())
    assert (work.mean, work.longest, work.tokens) == (10, 40, 16 * (6 + 10))
    assert work_of(config_of(), profile()).mean == 40


def test_a_mean_above_the_longest_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="expected_response_length = 41 exceeds max_response_length = 40"):
        config_of("sampling.expected_response_length=41")
    assert main(["grpo.yaml", *SEARCH, "--response-tokens", "41"]) == 1
    assert "--response-tokens 41: responses have 40 tokens at most" in capsys.readouterr().err


def test_the_cache_holds_sequences_of_the_expected_length() -> None:
    """16 sequences of 6 + 40 tokens take two blocks of 32 tokens each; of 6 + 10 one; one block is vLLM's own.

    A block has 32 tokens x 2 x 2 layers x 2 heads x 4 x 2 bytes. One of the longest fits in any case.
    """
    block = 32 * 2 * 2 * 2 * 4 * 2
    whole, expected = (
        place(config_of(*keys), 1, cuda=False).kv_cache for keys in ([], ["sampling.expected_response_length=10"])
    )
    assert (whole.whole, expected.whole) == (33 * block, 17 * block)
    assert whole.least == expected.least == 3 * block
    alone = config_of("sampling.expected_response_length=10", "rollout.max_num_seqs=1")
    assert place(alone, 1, cuda=False).kv_cache.whole == 3 * block


def test_a_search_reads_the_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    whole, _ = best(capsys)
    assert "responses of 40 tokens in the mean and 40 at most" in whole
    half, config = best(capsys, "--response-tokens", "10", "--prompt-tokens", "3")
    assert "By the load of 16 sequences: prompts of 3 tokens, responses of 10 tokens in the mean and 40 at" in half
    assert config["sampling"]["expected_response_length"] == 10
    # what it found is what a plan of its config and the same lengths says
    plan = ("--world-size", "2", "--time", "--profile", "device.json", "--json", "--prompt-tokens", "3")
    assert main(["best.yaml", *plan]) == 0
    seconds = json.loads(capsys.readouterr().out)["time"]["seconds"]
    row = next(line for line in half.splitlines() if line.startswith("│  1 │") or line.startswith("│ 1 │"))
    assert float(row.split("│")[2]) == pytest.approx(seconds, rel=1e-3)
    first = next(line for line in whole.splitlines() if line.startswith("│  1 │") or line.startswith("│ 1 │"))
    assert float(first.split("│")[2]) > seconds


@pytest.mark.parametrize(
    "wrong",
    [
        "actor.micro_batch_tokens=45",  # one sequence has 46
        "actor.tensor_parallel_size=3",
        "actor.sequence_parallel=true",
        "actor.ranks=0-6",
        "rollout.kv_cache_gib=1e-7",
        "actor.pipeline_parallel_size=9",
    ],
)
def test_a_value_that_the_search_replaces_is_not_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, config = best(capsys, wrong)
    assert "The config as given " in out and ("is refused" in out or "does not fit" in out)
    found = ExperimentConfig.from_tree(config, "best.yaml")
    place(found, 2)


def test_a_value_that_stays_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grpo.yaml", *SEARCH, "actor.micro_batch_tokens=45", "algorithm.update.mini_batch_size=5"]) == 1
    assert "mini_batch_size" in capsys.readouterr().err


def test_a_search_ends_within_a_minute_unless_it_is_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself and the two questions after it: five seconds each at least."""
    asked: list[float] = []

    def record(*arguments: object, minutes: float, **options: object) -> None:
        asked.append(60 * minutes)

    monkeypatch.setattr("hybridflow.cli.plan_search.print_search", record)
    assert main(["grpo.yaml", "--search", "--gpus", "2", "--profile", "device.json"]) == 0
    assert FIRST_SHARE * asked[0] + max(2 * 5.0, (1 - FIRST_SHARE) * asked[0]) < 50
