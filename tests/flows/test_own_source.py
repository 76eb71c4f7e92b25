"""The source that docs/extend/source.md shows: a queue of files gives the run whose rollouts were queued."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridflow.errors import DataError, FlowError
from hybridflow.flows.generation import SAMPLED, Greedy
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.flows.test_replay import rows
from tests.launch import run_ranks
from tests.pages import DOCS, blocks_of

[CODE] = [block.text for block in blocks_of(DOCS / "extend" / "source.md") if block.file == "my_source.py"]


def test_a_queue_says_what_it_has_not(tmp_path: Path) -> None:
    shown: dict[str, Any] = {"__name__": "my_source"}
    exec(CODE, shown)
    trainer = SimpleNamespace(scoring=None, config=None, inputs=SimpleNamespace(train=None))
    source = shown["QueueDirectory"](tmp_path, 0.2, trainer)
    source.begin(3, 4)
    with pytest.raises(FlowError, match=f"{tmp_path}: has one rollout an iteration"):
        source.responses([SAMPLED, Greedy()], (), None, None)
    with pytest.raises(DataError, match=f"{tmp_path}: has no iteration_000003.safetensors after 0.2 seconds"):
        source.responses([SAMPLED], (), None, None)
    with pytest.raises(FlowError, match=r"Set metrics.eval_interval=0"):
        source.evaluate(3, lambda: [], whole=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_inputs(tmp_path_factory.mktemp("source"))
    lines = (root / "train.jsonl").read_text().splitlines(keepends=True)
    (root / "turned.jsonl").write_text("".join(reversed(lines)))
    (root / "my_source.py").write_text(CODE)
    config = write_config(root / "config.yaml", root)
    run_ranks(2, "tests.flows.own_source_worker", config, root, root / "out.json")
    return root


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_queue_of_a_runs_rollouts_gives_its_metrics_and_weights(root: Path) -> None:
    """To the last bit, though another order of the data gives the prompts other numbers."""
    expected = rows(root / "engine")
    assert [row["iteration"] for row in expected] == ["1", "2"]
    assert {"actor/loss", "critic/grad_norm", "reward/score_mean", "rollout/gen_kl"} <= set(expected[0])
    assert rows(root / "queued") == expected
    known = json.loads((root / "out.json").read_text())
    assert known["queued"] == known["engine"]
    assert (root / "queued" / "hf" / "model.safetensors").exists()


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_run_whose_queue_stays_empty_is_saved(root: Path) -> None:
    """The next start resumed it, and trained on the file that had come."""
    known = json.loads((root / "out.json").read_text())
    error, note = known["starved"].splitlines()
    assert error == f"{root / 'queue'}: has no iteration_000002.safetensors after 3 seconds"
    assert note.startswith("the run is saved after iteration 1 (")
    assert not (root / "queued.1").exists()
