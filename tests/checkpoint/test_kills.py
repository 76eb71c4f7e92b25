"""Real runs end early, again and again, wherever they are: what is left in the end is what an undisturbed run leaves,
bit for bit: every metric that is no time or memory, every batch, every weight, every moment of the optimizers.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.checkpoint.kills import (
    EVERYWHERE,
    GOES_ON,
    ROUNDING,
    TABLE,
    End,
    Row,
    batches,
    damage_newest,
    every_place,
    make_more_inputs,
    rows,
    tensors,
)
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.environments.test_pool import alive
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

DEFAULT = ("synchronous", "one step off")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, selected: Callable[..., set[str]]) -> Path:
    """With the runs that nobody disturbs."""
    root = tmp_path_factory.mktemp("kills")
    write_config(root / "config.yaml", make_inputs(root / "inputs"))
    chosen = [*(TABLE[name] for name in TABLE if name in selected("name")), *map(every_place, sorted(selected("run")))]
    make_more_inputs(root, {row.run for row in chosen})
    undisturbed = {row.undisturbed: row.overrides(root) for row in chosen}
    run_ranks(2, "tests.flows.one_step_off_worker", root / "config.yaml", json.dumps(undisturbed))
    return root


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.thorough) for name in TABLE]
)
def test_a_run_that_ends_early_ends_as_any_other(name: str, root: Path) -> None:
    ends_as_any_other(TABLE[name], root / name.replace(" ", "-"))


@pytest.mark.weekly
@pytest.mark.parametrize("run", EVERYWHERE)
def test_every_place_in_every_run(run: str, root: Path) -> None:
    ends_as_any_other(every_place(run), root / f"every-{run.replace(' ', '-')}")


def ends_as_any_other(row: Row, run: Path) -> None:
    root, undisturbed = run.parent, run.with_name(row.undisturbed)
    given, below, surplus = [*row.overrides(root), f"name={run.name}"], list[int](), 0.0
    expected = rows(undisturbed, row.left_out)
    with disk(run / "checkpoints", [end.disk for end in row.ends]) as mount:
        for end in row.ends:
            mount(end.disk)
            below += ended(end, root, given)
            left = rows(run, row.left_out)
            assert left and left == expected[: len(left)], end
            surplus += float(left[-1].get("rollout/groups_surplus") or 0.0)
        assert row.run != "leftover" or surplus, "at no end there was something left over"
        mount("remount,rw,size=200m")
        if row.damaged:
            damage_newest(run)
        run_ranks(2, "hybridflow.train", root / "config.yaml", *given)
        assert rows(run, row.left_out) == expected and len({x["actor/lr"] for x in expected}) == len(expected)
        for iteration in (len(expected) - 1, len(expected)):
            assert tensors(run, iteration) == tensors(undisturbed, iteration), iteration
        assert not list((run / "checkpoints").glob(".*")), "nothing is left of what did not become one"
    same_batches(run, undisturbed, rounded=row.left_out == ROUNDING)
    assert (run / "hf" / "model.safetensors").read_bytes() == (undisturbed / "hf" / "model.safetensors").read_bytes()
    until = time.monotonic() + 30
    while any(map(alive, below)):
        assert time.monotonic() < until, "what a rank has started outlives it"
        time.sleep(0.05)


def ended(end: End, root: Path, given: list[str]) -> list[int]:
    """The processes below a rank that was killed."""
    what, *more = [each.replace("ROOT", str(root)) for each in (end.what, *end.overrides)]
    arguments = (end.rank, end.place, end.number, what, root / "config.yaml", *given, *more)
    done = run_ranks(2, "tests.checkpoint.killed_worker", *arguments, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == (end.overrides == GOES_ON) and end.said in said, said
    found = re.findall(r"^below(.*)$", done.stdout, flags=re.MULTILINE)
    assert len(found) == (end.number > 0 and end.what not in ("told", "nothing")), f"{end} was not reached\n{said}"
    below = [int(pid) for pid in " ".join(found).split()]
    if "words/" in what:
        agents = [int(pid) for word in (root / "words").iterdir() for pid in word.read_text().split()]
        assert len(agents) == 8 and set(agents) < set(below), "two of each row, the supervisor's beside them"
    return below


def same_batches(run: Path, undisturbed: Path, *, rounded: bool) -> None:
    found, expected = batches(run), batches(undisturbed)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if rounded and name == "rollout_log_probs":
                torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-4)
            else:
                assert torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()), name


@contextmanager
def disk(path: Path, options: list[str]) -> Iterator[Callable[[str], None]]:
    """Mounts, if any of the options says something; what was there is on the disk then."""

    def mount(how: str) -> None:
        if not any(options) or not how:
            return
        before = path.with_name("before")
        if not path.is_mount():
            path.rename(before)
            path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
        if before.exists():
            shutil.copytree(before, path, dirs_exist_ok=True)
            shutil.rmtree(before)

    try:
        yield mount
    finally:
        if path.is_mount():
            subprocess.run(["umount", str(path)], check=True)
