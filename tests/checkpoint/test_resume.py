"""Real runs that end early and go on: elsewhere, with another config, after damage, with files that cannot be written.

Every start is a launch of `hybridflow.train`; what a person would see is what is looked at.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.checkpoint.state import load_state
from hybridflow.checkpoint.store import step_name, steps
from hybridflow.errors import ExitStatus
from tests.checkpoint.kills import rows, tensors
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import of_no_rank, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

NUM_ITERATIONS = 8
SETTINGS = [f"num_iterations={NUM_ITERATIONS}", "algorithm.update.mini_batch_size=4"]
SETTINGS += ["algorithm.kl.controller=adaptive", "reward.normalization=running"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and the run that nobody disturbs: actor tp 2, critic dp 2, a checkpoint every two iterations."""
    root = tmp_path_factory.mktemp("resume")
    write_config(root / "config.yaml", make_inputs(root / "inputs"))
    train(root, "undisturbed", "checkpoint.save_interval=2", "checkpoint.keep_last=9")
    return root


def train(
    root: Path, name: str, *overrides: str, ranks: int = 2, status: int = 0, module: str = "hybridflow.train"
) -> str:
    """What the run says."""
    done = run_ranks(ranks, module, root / "config.yaml", *SETTINGS, f"name={name}", *overrides, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == (status != 0), said
    return said


def copied(root: Path, name: str, *, up_to: int) -> Path:
    """The undisturbed run as it was after iteration `up_to`, under another name; its checkpoints."""
    run = root / name
    shutil.copytree(root / "undisturbed", run)
    for iteration in steps(run / "checkpoints"):
        if iteration > up_to:
            shutil.rmtree(run / "checkpoints" / step_name(iteration))
    return run / "checkpoints"


# ---------------------------------------------------------------------------------------------- elsewhere

ACTOR_PP2 = ("actor.tensor_parallel_size=1", "actor.pipeline_parallel_size=2", "critic.tensor_parallel_size=2")
ACTOR_DP2 = ("actor.tensor_parallel_size=1", "critic.pipeline_parallel_size=2")
ACTOR_CP2 = ("actor.tensor_parallel_size=1", "actor.context_parallel_size=2", "actor.micro_batch_tokens=20")
ACTOR_TP2PP2 = ("actor.pipeline_parallel_size=2",)  # on 4 ranks; the critic follows with dp 4
# the bytes of a hand-off depend on the layout; so do the moments of floats
PLACE_DEPENDENT = ("reshard/",)


@pytest.mark.parametrize(
    ("name", "first", "starts"),
    [
        pytest.param("pp2", 3, [(ACTOR_PP2, 2, 8)], marks=pytest.mark.weekly),
        pytest.param("dp2", 3, [(ACTOR_DP2, 2, 8)], marks=pytest.mark.weekly),
        ("cp2", 3, [(ACTOR_CP2, 2, 8)]),
        ("4-2-4", 3, [(ACTOR_TP2PP2, 4, 4), (("actor.tensor_parallel_size=2",), 2, 6), (ACTOR_TP2PP2, 4, 8)]),
    ],
)
def test_it_goes_on_in_other_layouts(name: str, first: int, starts: list, root: Path) -> None:
    copied(root, name, up_to=2)
    for layout, ranks, last in starts:
        train(root, name, "checkpoint.save_interval=2", *layout, f"num_iterations={last}", ranks=ranks)
    found, expected = rows(root / name, first=first), rows(root / "undisturbed", first=first)
    assert len(found) == NUM_ITERATIONS - first + 1
    for row, same in zip(found, expected, strict=True):
        for metric in row:
            if row[metric] != same[metric] and not metric.startswith(PLACE_DEPENDENT):
                assert float(row[metric]) == pytest.approx(float(same[metric]), rel=1e-4, abs=1e-4), metric


# ---------------------------------------------------------------------------------------------- damage


def flip(step: Path) -> str:
    file = step / "critic" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    return str(file)


def test_a_damaged_checkpoint_is_told_and_the_one_before_used(root: Path) -> None:
    name = "flip"
    checkpoints = copied(root, name, up_to=6)
    file = flip(checkpoints / "step_000006")
    said = train(root, name, "checkpoint.save_interval=2", "checkpoint.keep_last=9")
    assert f"{checkpoints / 'step_000006'} is not intact" in said and file in said
    assert f"resumes from {checkpoints / 'step_000004'}" in said
    assert rows(root / name) == rows(root / "undisturbed")
    assert tensors(root / name, 6) == tensors(root / "undisturbed", 6), "it is written again"


def test_no_intact_checkpoint_is_an_error(root: Path) -> None:
    checkpoints = copied(root, "damaged", up_to=2)
    file = flip(checkpoints / "step_000002")
    said = train(root, "damaged", status=1)
    assert file in said and "checkpoint.load=none starts anew" in said
    assert (root / "damaged" / "metrics.csv").exists(), "nothing is moved or lost"


# ---------------------------------------------------------------------------------------------- another config


def test_what_changed_is_shown_and_what_may_not_change_refused(root: Path) -> None:
    copied(root, "changed", up_to=6)
    said = train(root, "changed", "actor.optimizer.name=sgd", "seed=5", "actor.optimizer.lr=0.5", status=1)
    assert "actor.optimizer.name: adam -> sgd" in said
    assert "seed: 1 -> 5" in said
    said = train(root, "changed", "actor.optimizer.lr=0.0005")
    assert "actor.optimizer.lr: 0.001 -> 0.0005  (takes effect from iteration 7 on)" in said
    assert rows(root / "changed")[:6] == rows(root / "undisturbed")[:6]
    assert rows(root / "changed")[-1] != rows(root / "undisturbed")[-1]


def test_a_fork_begins_with_anothers_weights_and_goes_on_by_itself(root: Path) -> None:
    source = root / "undisturbed" / "checkpoints" / "step_000004"
    fork = ("checkpoint.save_interval=2", f"checkpoint.load={source}")
    said = train(root, "fork", *fork, "num_iterations=6")
    assert f"a fork of {source}, after iteration 4" in said
    assert [row["iteration"] for row in rows(root / "fork")] == ["5", "6"]
    said = train(root, "fork", *fork)  # the same command goes on with what it has
    assert f"resumes from {root / 'fork' / 'checkpoints' / 'step_000006'}" in said
    assert rows(root / "fork") == rows(root / "undisturbed", first=5)
    assert load_state(root / "fork" / "checkpoints" / "step_000008").forked_from == str(source)
    assert rows(root / "undisturbed", first=7), "the other run is as it was"


def test_load_none_starts_anew_and_a_wrong_path_is_an_error(root: Path) -> None:
    copied(root, "anew", up_to=8)
    train(root, "anew", "checkpoint.load=none", "num_iterations=1")
    assert len(rows(root / "anew")) == 1 and len(rows(root / "anew.1")) == NUM_ITERATIONS
    said = train(root, "nowhere", f"checkpoint.load={root / 'inputs'}", status=1)
    assert f"checkpoint.load = '{root / 'inputs'}'" in said and "manifest.json" in said


def test_a_run_that_is_over_has_nothing_to_do(root: Path) -> None:
    copied(root, "over", up_to=8)
    said = train(root, "over")
    assert "iteration 8/8" not in said and "resumes from" in said
    assert "all 8 iterations are done; checkpoint.load=none starts anew" in said
    assert rows(root / "over") == rows(root / "undisturbed")


# ---------------------------------------------------------------------------------------------- what cannot be written


def test_a_row_that_cannot_be_written_costs_no_iteration(root: Path) -> None:
    """The file of metrics is on a full device from the fifth iteration on; checkpoints are not."""
    copied(root, "unwritten", up_to=4)
    seldom = "checkpoint.save_interval=100"
    said = train(root, "unwritten", seldom, status=1, module="tests.checkpoint.full_record_worker")
    file, saved = root / "unwritten" / "metrics.csv", root / "unwritten" / "checkpoints" / "step_000005"
    [error] = [line for line in said.splitlines() if line.startswith("hybridflow: error: ")]
    assert error == (
        f"hybridflow: error: rank 0: {file}: cannot be written: No space left on device; the run is saved after "
        f"iteration 5 ({saved}), and the same command resumes"
    )
    assert "Traceback" not in said and saved.exists()
    said = train(root, "unwritten", seldom)
    assert f"resumes from {saved}" in said
    assert f"{file} has no row of 1 of the iterations up to 5, the first is 5" in said
    expected = rows(root / "undisturbed")
    assert rows(root / "unwritten") == expected[:4] + expected[5:]


def test_a_model_that_cannot_be_written_costs_no_iteration(root: Path) -> None:
    """Nothing is saved before: the run is too short for that. The other ranks of the actor do not wait for ever."""
    copied(root, "unexported", up_to=6)
    (root / "unexported" / ".hf.partial").touch()
    said = train(root, "unexported", status=1)
    [error] = [line for line in said.splitlines() if line.startswith("hybridflow: error: ")]
    run = root / "unexported"
    assert error == (
        f"hybridflow: error: the trained model cannot be written to {run / 'hf'}: rank 0: {run / '.hf.partial'}: "
        f"cannot be written: File exists; the run is saved after iteration 8 ({run / 'checkpoints' / 'step_000008'}), "
        "and the same command resumes"
    )
    (run / ".hf.partial").unlink()
    assert "all 8 iterations are done" in train(root, "unexported")
    assert (run / "hf" / "model.safetensors").read_bytes() == (
        root / "undisturbed" / "hf" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "stdout",
    ["a full disk", *(pytest.param(x, marks=pytest.mark.weekly) for x in ("a pipe that nobody reads", "closed"))],
)
def test_a_run_that_nobody_can_watch_goes_on(stdout: str, root: Path) -> None:
    """Two ranks that the command starts: of neither it nor of them."""
    name = stdout.replace(" ", "_")
    words = [sys.executable, "-m", "hybridflow", "train", str(root / "config.yaml"), *SETTINGS, f"name={name}"]
    behind = {"a pipe that nobody reads": "| true", "a full disk": "> /dev/full", "closed": ">&-"}[stdout]
    script = f"{shlex.join([*words, 'num_iterations=2'])} {behind}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], env=of_no_rank(), stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr, "error" in done.stderr) == (0, False, False), done.stderr
    assert rows(root / name) == rows(root / "undisturbed")[:2]
    assert (root / name / "hf" / "model.safetensors").exists()
    log = (root / name / "logs" / "rank_0.log").read_text()
    assert ("stdout cannot be written" in log) == (stdout != "closed") and "iteration 2/2" in log


def test_hosts_that_share_no_directory_are_told_when_the_run_starts(root: Path) -> None:
    here = ("output_dir=here", "checkpoint.save_interval=1")
    said = train(root, "apart", *here, status=1, module="tests.checkpoint.apart_worker")
    assert "rank 1: output_dir = 'here' on " in said and "is not the directory that rank 0 sees" in said
    assert not (root / "of rank 0" / "here" / "apart").exists(), "nothing has begun"


# ---------------------------------------------------------------------------------------------- being told to end


def test_max_hours_saves_and_ends_and_the_rollout_is_kept(root: Path) -> None:
    """With no time at all the run ends in its first iteration, and has what it began with."""
    said = train(root, "hours", "checkpoint.max_hours=1e-9", "checkpoint.save_rollout=true", status=ExitStatus.STOPPED)
    assert "stopped in iteration 1" in said and "the run is saved" in said
    assert steps(root / "hours" / "checkpoints") == [0]
    kept = root / "hours" / "checkpoints" / "rollout" / "batches" / "iteration_000001.safetensors"
    assert kept.exists()
    train(root, "hours", "checkpoint.save_rollout=true")
    generated = {name for name in rows(root / "hours")[0] if not name.startswith("reshard/")}
    for row, same in zip(rows(root / "hours"), rows(root / "undisturbed"), strict=True):
        assert {name: row[name] for name in generated} == {name: same[name] for name in generated}
    assert rows(root / "hours")[0]["reshard/bytes_permuted"] == "0.0", "the first was not generated again"
