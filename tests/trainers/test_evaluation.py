"""An evaluation by itself finds what the run found at that iteration, on a checkpoint and on the exported model."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks
from tests.tiny_models import make_prompts

pytestmark = pytest.mark.distributed

JUDGE = 'metrics.eval_reward={function: "tests.trainers.test_evaluation:begins_low"}'
LAYOUTS = {1: ["actor.tensor_parallel_size=1"], 2: ["actor.tensor_parallel_size=2", "rollout.tensor_parallel_size=1"]}
SETS = ("one", "many")


def begins_low(
    prompts: list[str], responses: list[str], columns: dict[str, list[Any]], *, is_evaluation: bool
) -> list[float]:
    """Right where a response begins with a digit below 5, as some do; in an evaluation alone."""
    return [float(is_evaluation and response[:1] in tuple("01234")) for response in responses]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.thorough)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By iteration what the run has written, and by name what evaluations have found; on so many ranks."""
    root = tmp_path_factory.mktemp("evaluation")
    inputs = make_inputs(root / "inputs")
    heldout = make_prompts(inputs / "heldout.jsonl", 16, seed=1)
    sets = {"one": {"files": str(heldout)}, "many": {"files": str(heldout), "samples": 4, "temperature": 0.8}}
    overrides = [f"data.heldout={json.dumps(sets)}", JUDGE, "metrics.eval_interval=1", "checkpoint.save_interval=1"]
    out = root / "found.json"
    run_ranks(
        request.param,
        "tests.trainers.evaluation_worker",
        write_config(root / "config.yaml", inputs),
        out,
        *overrides,
        *LAYOUTS[request.param],
    )
    with (root / "run" / "metrics.csv").open() as file:
        rows = {int(row["iteration"]): row for row in csv.DictReader(file)}
    return json.loads(out.read_text()) | {"rows": rows, "run": root / "run"}


@pytest.mark.parametrize(("name", "iteration"), [("first", 1), ("last", 2), ("hf", 2)])
def test_it_finds_what_the_run_found(name: str, iteration: int, found: dict[str, Any]) -> None:
    """To the bit, sampled responses included: seeds go by the set, not by the iteration."""
    written = {
        key: float(value) for key, value in found["rows"][iteration].items() if key.startswith("eval/") and value
    }
    assert found[name] == written
    assert {f"eval/{key}/accuracy" for key in SETS} | {"eval/many/pass_at_4", "eval/many/majority_at_4"} < set(written)


def test_the_numbers_are_of_different_models(found: dict[str, Any]) -> None:
    """Else the comparison would prove little."""
    assert found["first"] != found["last"]
    assert 0 < found["last"]["eval/many/accuracy"] < 1
    assert found["last"]["eval/many/accuracy"] < found["last"]["eval/many/pass_at_4"]


def test_nothing_of_the_run_is_touched_but_eval(found: dict[str, Any]) -> None:
    assert found["untouched"]
    for name in ("step_000001", "step_000002", "hf"):
        assert {file.name for file in (found["run"] / "eval" / name).iterdir()} >= {
            "results.json",
            "one.jsonl",
            "many.jsonl",
        }


def test_results_are_written_beside_the_samples(found: dict[str, Any]) -> None:
    directory = found["run"] / "eval" / "step_000001"
    results = json.loads((directory / "results.json").read_text())
    assert results["iteration"] == 1 and list(results["sets"]) == list(SETS)
    many, metrics = results["sets"]["many"], found["first"]
    assert many["accuracy"] == metrics["eval/many/accuracy"] == many["pass_at"]["1"]
    assert many["pass_at"]["4"] == metrics["eval/many/pass_at_4"] and list(many["pass_at"]) == ["1", "2", "4"]
    assert many["majority_at"] == {"4": metrics["eval/many/majority_at_4"]}
    samples = [json.loads(line) for line in (directory / "many.jsonl").read_text().splitlines()]
    assert len(samples) == 16 * 4 and {sample["set"] for sample in samples} == {"many"}
    right = [sample["parts"]["right"] for sample in samples]
    assert sum(right) / len(right) == many["accuracy"]
    assert right == [float(sample["response"][:1] in set("01234")) for sample in samples]
    drawn = [sample["response"] for sample in samples[:4]]
    assert len(set(drawn)) > 1, "samples of a prompt have seeds of their own"


@pytest.mark.thorough
def test_sampled_responses_are_the_same_on_one_rank_and_two(tmp_path: Path) -> None:
    """Greedy and sampled ones, of the model before training, which no layout has summed in another order yet."""
    inputs = make_inputs(tmp_path / "inputs")
    sets = {"many": {"files": str(inputs / "heldout.jsonl"), "samples": 4, "temperature": 0.8}}
    texts = []
    for num_ranks, layout in LAYOUTS.items():
        root = tmp_path / str(num_ranks)
        root.mkdir()
        overrides = [f"data.heldout={json.dumps(sets)}", JUDGE, "metrics.eval_interval=1", "checkpoint.save_interval=1"]
        overrides += ["actor.optimizer.lr=0.0", *layout]
        config = write_config(root / "config.yaml", inputs)
        run_ranks(num_ranks, "tests.trainers.evaluation_worker", config, root / "out.json", *overrides)
        file = root / "run" / "eval" / "hf" / "many.jsonl"
        texts.append([json.loads(line)["response"] for line in file.read_text().splitlines()])
    assert texts[0] == texts[1] and len(set(texts[0])) > 4
