"""A rank that stops is named, with the seconds, by the metrics and by the line of the iteration."""

import csv
import re
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

SECONDS = 3.0


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("tp", [1, 2])
def test_the_rank_that_the_others_waited_for_is_named(tp: int, tmp_path: Path) -> None:
    """Whether they wait in the sum of gradients or in a tensor-parallel layer."""
    config = write_config(tmp_path / "config.yaml", make_inputs(tmp_path / "inputs"))
    overrides = [f"actor.tensor_parallel_size={tp}", "num_iterations=3", "checkpoint.save_minutes=null"]
    done = run_ranks(2, "tests.recording.slow_rank_worker", config, *overrides)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[1]
    assert row["iteration"] == "2" and row["time/slowest_rank"] == "1.0"
    assert 0.8 * SECONDS < float(row["time/slowest_rank_seconds"]) < 1.5 * SECONDS + 1
    waited = {rank: float(row[f"time/wait_fraction_rank_{rank}"]) for rank in (0, 1)}
    assert waited[0] - waited[1] > 0.8 * SECONDS / float(row["time/iteration_seconds"])
    [line] = [line for line in done.stdout.splitlines() if line.startswith("iteration 2/3")]
    assert re.search(r"  waited [2-5]\.\d s for rank 1$", line), line
