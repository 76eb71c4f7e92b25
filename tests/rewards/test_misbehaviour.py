"""Training jobs whose reward functions do what users' do: they go on or stop as configured, and leave no process."""

import csv
import json
import os
import signal
import time
import uuid
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import SECONDS, run_ranks, start_torchrun
from tests.rewards.misbehaving import WAYS

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

PER_ITERATION = 5
TIMEOUT = 10.0  # far more than any but those that hang take on a busy machine
FUNCTIONS = "tests.rewards.misbehaving"
GOES_ON = "well", "late alarm", "own alarm", "prints", "returns twice"
TOO_LONG = "hang", "hang with descendants", "deaf hang", "prints without end"
HELDOUT = "well", "raises", "well", "os._exit", "well"
EVALUATION = "metrics.eval_interval=4", f"metrics.eval_reward={FUNCTIONS}:right"
IN_THE_WAY = "hang", "deaf hang", "os._exit"  # of the `async def`


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def experiment(directory: Path, inputs: Path, rows: list[dict], reward: dict, **changes: object) -> Path:
    """Of GRPO without a critic or a reference, a response a prompt and two for `samples`."""
    config = write_config(directory / "config.yaml", inputs)
    tree = json.loads(config.read_text())
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["data"] |= {"train": str(file), "prompts_per_iteration": PER_ITERATION}
    tree["algorithm"] = {"name": "reinforce", "kl": {"use": "none"}, "update": {"mini_batch_size": PER_ITERATION}}
    tree |= {"reward": reward, "num_iterations": len(rows) // PER_ITERATION} | changes
    tree["metrics"] |= {"num_samples": PER_ITERATION}
    del tree["critic"], tree["reference"]
    config.write_text(json.dumps(tree))
    return config


def marked() -> tuple[str, dict[str, str]]:
    """A mark, and an environment with it: whatever a run starts has it, in any session and of any parent."""
    mark = uuid.uuid4().hex
    return mark, {"HYBRIDFLOW_TEST_MARK": mark}


def processes(mark: str) -> list[str]:
    """Their command lines."""
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if directory.name.isdigit() and mark.encode() in (directory / "environ").read_bytes():
                found.append((directory / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended meanwhile
    return found


def assert_none_left(mark: str, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while left := processes(mark):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_a_run_goes_on_whatever_its_functions_do(inputs: Path, tmp_path: Path) -> None:
    """Each way in a row of its own; failed rows count as -1, all of them are counted and shown."""
    ways = [*WAYS, "well"]
    assert len(ways) % PER_ITERATION == 0
    rows = [{"prompt": f"{10 + i}+7=", "how": how} for i, how in enumerate(ways)]
    reward = {
        "functions": [
            {"function": f"{FUNCTIONS}:misbehaves", "weight": 2.0},
            {"function": f"{FUNCTIONS}:waits"},
            {
                "function": f"{FUNCTIONS}:length_parts",
                "per": "group",
                "arguments": {"most": 8},
                "parts": {"of_most": 0.5, "rank": 4.0},
            },
        ],
        "timeout_seconds": TIMEOUT,
        "memory_gib": 0.5,
        "max_processes": 12,  # so many hold less than 0.5 GiB: that limit is for others
        "on_error": "score",
        "error_score": -1.0,
    }
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(json.dumps({"prompt": "1+1=", "how": how}) + "\n" for how in HELDOUT))
    config = experiment(tmp_path, inputs, rows, reward)
    overrides = [f"data.heldout={heldout}", *EVALUATION]
    mark, environment = marked()
    done = run_ranks(2, "hybridflow.train", config, *overrides, environment=environment)
    output = done.stdout + done.stderr
    assert_none_left(mark)
    written = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    samples = [sample for sample in written if sample["kind"] == "train"]
    assert [sample["parts"]["misbehaves"] for sample in samples] == [0.5 if how in GOES_ON else -1.0 for how in ways]
    assert [sample["parts"]["waits"] for sample in samples] == [-1.0 if how in IN_THE_WAY else 0.25 for how in ways]
    for sample in samples:
        parts = sample["parts"]
        assert list(parts) == ["misbehaves", "waits", "length_parts/of_most", "length_parts/rank"]
        assert parts["length_parts/of_most"] == len(sample["response"]) / 8 and parts["length_parts/rank"] == 0.0
        expected = 2.0 * parts["misbehaves"] + parts["waits"] + 0.5 * parts["length_parts/of_most"]
        assert sample["score"] == pytest.approx(expected, abs=1e-6)
    check_counts(tmp_path / "run" / "metrics.csv", ways, samples)
    check_output(output)


def check_counts(file: Path, ways: list[str], samples: list[dict]) -> None:
    before, *table = csv.DictReader(file.read_text().splitlines())
    for row in (before, table[-1]):
        assert (float(row["eval/accuracy"]), float(row["eval/failed_rows"])) == (pytest.approx(0.6), 2.0)
    for i, row in enumerate(table):
        rows = slice(i * PER_ITERATION, (i + 1) * PER_ITERATION)
        own, parts = ways[rows], [sample["parts"] for sample in samples[rows]]
        timeouts = sum(how in TOO_LONG for how in own) + sum(how in ("hang", "deaf hang") for how in own)
        failed = sum(how not in GOES_ON for how in own) + sum(how in IN_THE_WAY for how in own)
        assert float(row["reward/timeouts"]) == timeouts, own
        assert float(row["reward/errors"]) == failed - timeouts, own
        mean = sum(part["length_parts/of_most"] for part in parts) / PER_ITERATION
        assert float(row["reward/length_parts/of_most"]) == pytest.approx(mean, abs=1e-6)
        assert float(row["reward/row_max_ms"]) > (1000.0 * TIMEOUT if timeouts else 100.0)


def check_output(output: str) -> None:
    name = f"{FUNCTIONS}:misbehaves] "
    for text in (
        f"{name}printed by a function",
        f"{name}written by a function",
        "scored as -1: reward function tests.rewards.misbehaving:misbehaves: row 1: took longer than "
        "reward.timeout_seconds = 10; its prompt is '11+7='",
        "the process that called it ended with exit status 3",
        "the process that called it ended with exit status 5",
        "the process that called it was ended by SIGSEGV",
        "raised MemoryError",
        "raised RecursionError",
        "raised SystemExit: out of here",
        "raised KeyError: 'no such key'",
        "reward.max_processes = 12",
        "reward.memory_gib = 0.5",
    ):
        assert text in output, f"{text}\n{output[-20000:]}"


def test_a_run_stops_where_it_is_told_to(inputs: Path, tmp_path: Path) -> None:
    """With the row, its prompt and the limit; what the row had started is gone with the run."""
    rows = [{"prompt": f"{10 + i}+7=", "how": "well"} for i in range(2 * PER_ITERATION)]
    rows[PER_ITERATION + 3]["how"] = "hang with descendants"
    config = experiment(
        tmp_path, inputs, rows, {"functions": [{"function": f"{FUNCTIONS}:misbehaves"}], "timeout_seconds": 5.0}
    )
    mark, environment = marked()
    done = run_ranks(2, "hybridflow.train", config, check=False, environment=environment)
    assert done.returncode == 1
    expected = (
        "hybridflow: error: reward function tests.rewards.misbehaving:misbehaves: row 3: took longer than "
        "reward.timeout_seconds = 5; its prompt is '18+7='"
    )
    assert (done.stdout + done.stderr).count(expected) == 1, done.stdout + done.stderr
    assert_none_left(mark)


def test_nothing_is_left_of_a_run_that_is_killed(inputs: Path, tmp_path: Path) -> None:
    """All of its ranks and the agent at once, by SIGKILL, while functions run that have started others."""
    rows = [{"prompt": f"{10 + i}+7=", "directory": str(tmp_path)} for i in range(PER_ITERATION)]
    config = experiment(tmp_path, inputs, rows, {"functions": [{"function": f"{FUNCTIONS}:begun"}]})
    mark, environment = marked()
    agent = start_torchrun(2, "-m", "hybridflow.train", config, environment=environment)
    until = time.monotonic() + SECONDS
    while len(list(tmp_path.glob("begun *"))) < 2 or sum("sleep(1000)" in line for line in processes(mark)) < 4:
        assert agent.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in [agent.pid, *map(int, ranks)]:
        os.kill(pid, signal.SIGKILL)
    agent.communicate(timeout=60)
    assert_none_left(mark)
