"""hybridflow.examples.tiny.stages: two iterations of each stage, and what is told of them."""

import csv
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.examples.tiny.runs import RunFailed
from hybridflow.examples.tiny.stages import Reached, Stages, main, table
from tests.tools.runs import BRIEF, in_forks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reached]:
    directory = tmp_path_factory.mktemp("stages") / "seed_5"
    (directory / "runs").mkdir(parents=True)
    (directory / "runs" / "old").write_text("of an earlier start")
    return directory, Stages(directory, 5, in_forks, BRIEF).run()


def test_each_stage_begins_with_the_one_before(made: tuple[Path, Reached]) -> None:
    directory, _ = made
    runs = directory / "runs"
    assert sorted(path.name for path in runs.iterdir()) == ["dpo", "reward_model", "sft"]
    policy = str(runs / "sft" / "hf")
    said = {name: (runs / name / "config.yaml").read_text() for name in ("sft", "reward_model", "dpo")}
    assert f"model: {directory / 'start'}" in said["sft"]
    assert said["reward_model"].count(f"model: {policy}") == 1
    assert said["dpo"].count(f"model: {policy}") == 2, "the actor and the reference"
    [before, *_] = csv.DictReader((runs / "dpo" / "metrics.csv").open(newline=""))
    assert float(before["eval/loss"]) == pytest.approx(0.6931472, abs=1e-6), "log 2: the actor is the reference"


def test_no_stage_has_seen_a_held_out_prompt(made: tuple[Path, Reached]) -> None:
    directory, _ = made
    prompts = {
        file.stem: {json.loads(line)["prompt"] for line in file.open()} for file in sorted(directory.glob("*.jsonl"))
    }
    heldout = prompts["preferences_heldout"]
    assert len(heldout) == 256
    seen = prompts["sft"] | prompts["validation"] | prompts["preferences"]
    assert not seen & heldout
    assert not prompts["validation"] & prompts["sft"]


def test_what_is_told_is_what_the_models_do(made: tuple[Path, Reached]) -> None:
    directory, reached = made
    rows = [json.loads(line) for line in (directory / "preferences_heldout.jsonl").open()]
    for name, told in (("start", reached.start), ("runs/sft/hf", reached.sft), ("runs/dpo/hf", reached.dpo)):
        tokenizer = AutoTokenizer.from_pretrained(directory / name)
        model = AutoModelForCausalLM.from_pretrained(directory / name)
        prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**prompts, do_sample=False, max_new_tokens=8)[:, prompts["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        right = sum(text.strip() == row["chosen"] for text, row in zip(texts, rows, strict=True))
        assert right / len(rows) == told
    *_, last = csv.DictReader((directory / "runs" / "reward_model" / "metrics.csv").open(newline=""))
    assert float(last["eval/reward_accuracy"]) == reached.pairs
    assert 0 < reached.pairs < 1


def test_the_table(capsys: pytest.CaptureFixture) -> None:
    Console(width=100).print(table([Reached(3, start=0.0, sft=0.5, pairs=0.75, dpo=0.625, seconds=61.4)]))
    cells = capsys.readouterr().out.splitlines()[-2].replace("│", " ").split()
    assert cells == ["3", "0.0%", "50.0%", "75.0%", "62.5%", "61"]


def test_a_stage_that_fails_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(RunFailed, match="seed 5: sft has ended with status 3"):
        Stages(tmp_path / "seed_5", 5, lambda arguments, log: 3).run()
    monkeypatch.setattr("hybridflow.examples.tiny.stages.by_command", lambda arguments, log: 4)
    assert main([str(tmp_path / "all"), "--seeds", "2"]) == 1
    assert "error: seed 2: sft has ended with status 4" in capsys.readouterr().err
    assert not (tmp_path / "all" / "stages.json").exists()
