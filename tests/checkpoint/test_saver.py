"""Saving where something goes wrong: every rank sees the same, what was there before stays, and the next save works."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.messages import like
from tests.tiny_models import make_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

EVERY = (0, 1)  # rank


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where the scenes are, and what each rank saw."""
    root = tmp_path_factory.mktemp("saver")
    make_checkpoints(root / "models", family="llama", tied=False, num_layers=2)
    (root / "out").mkdir()
    run_ranks(2, "tests.checkpoint.saver_worker", root / "models", root / "out")
    found = [json.loads((root / "out" / f"rank_{rank}.json").read_text()) for rank in EVERY]
    return root / "out", found


def failed(root: Path, iteration: int, *, before: str) -> str:
    file = root / f".step_{iteration:06d}.partial/actor/__1_0.distcp"
    why = f"rank 1: {file}: cannot be written: [Errno 27] File too large"
    return f"the checkpoint of iteration {iteration} cannot be written: {why} ({before})"


@pytest.mark.parametrize("rank", EVERY)
@pytest.mark.parametrize("name", ["a rank fails", "a rank fails in the background"])
def test_what_one_rank_cannot_write_all_are_told(name: str, rank: int, launch: tuple) -> None:
    out, found = launch
    root, seen = out / name / "checkpoints", found[rank][name]
    assert seen["error"] == failed(root, 2, before=f"{root / 'step_000001'} is as it was")
    assert seen.get("error at once") is None, "in the background"
    assert (seen["after"], seen["last"], seen["leftovers"]) == ([1], 1, [])
    assert seen["end"] == [1, 2], "the next attempt"
    assert seen["same"], "of the same weights"


@pytest.mark.parametrize("rank", EVERY)
@pytest.mark.parametrize("name", ["the run goes on", "the run goes on, in the background"])
def test_the_run_goes_on_where_it_is_told_to(name: str, rank: int, launch: tuple) -> None:
    out, found = launch
    seen, error = found[rank][name], failed(out / name / "checkpoints", 1, before="there is none before it")
    assert seen["failed"] == [like(f"warning: {error}; the run continues (checkpoint.on_error = continue)")]
    assert (seen["after"], seen["end"]) == ([], [2])
    (saved,) = seen["saved"]
    assert re.fullmatch(r"saved step_000002: \d\.\d MB", saved)


@pytest.mark.parametrize("rank", EVERY)
def test_a_second_save_waits_for_the_first(rank: int, launch: tuple) -> None:
    seen = launch[1][rank]["a second waits for the first"]
    assert (seen["while held"], seen["still"]) == ([], None)
    assert 0.4 < seen["waited"]
    assert (seen["last"], seen["both"], seen["end"]) == (1, [1], [1, 2])


def test_what_is_written_in_the_background_is_what_was_when_it_began(launch: tuple) -> None:
    """1, 3 and 5 are written while training waits: 3 and 5 a step later than what 2 and 4 have to hold."""
    seen = launch[1][0]["weights change meanwhile"]
    assert list(seen) == ["1", "2", "3", "4", "5"]
    assert seen["1"] == seen["2"] != seen["3"] == seen["4"] != seen["5"]
    assert set(seen["1"]) == {"actor/__0_0.distcp", "actor/__1_0.distcp"}
    assert all(seen["1"][name] != seen["3"][name] for name in seen["1"])


@pytest.mark.parametrize("rank", EVERY)
def test_room_is_looked_for_before(rank: int, launch: tuple) -> None:
    out, found = launch
    root, seen = out / "no room" / "checkpoints", found[rank]["no room"]
    partial = root / ".step_000002.partial"
    match = re.fullmatch(
        rf"the checkpoint of iteration 2 cannot be written: rank 0: {re.escape(str(partial))}: needs (\d+) bytes, "
        rf"the disk has (\d+) left \({re.escape(str(root / 'step_000001'))} is as it was\)",
        seen["error"],
    )
    needed, free = int(match[1]) - (1 << 60), int(match[2])
    assert 0.8 * seen["sizes"] < needed < seen["sizes"], "the tensors without what is around them"
    assert 0 < free < 1 << 60
    assert (seen["after"], seen["leftovers"]) == ([1], [])


@pytest.mark.parametrize("rank", EVERY)
def test_a_directory_that_vanishes_fails_one_save(rank: int, launch: tuple) -> None:
    out, found = launch
    seen, root = found[rank]["the directory vanishes"], out / "the directory vanishes" / "checkpoints"
    assert seen["error"] == (
        like(
            f"the checkpoint of iteration 2 cannot be written: rank 0: {root / '.step_000002.partial'}: "
            "No such file or directory (there is none before it)"
        )
    )
    assert seen["end"] == [3]


@pytest.mark.parametrize("rank", EVERY)
def test_a_rank_that_has_no_memory_for_copies_does_not_leave_alone(rank: int, launch: tuple) -> None:
    seen = launch[1][rank]["copies cannot be made"]
    assert "iteration 1 cannot be written: rank 1: ValueError: memoryview assignment" in seen["error"]
    assert (seen["after"], seen["leftovers"]) == ([], [])


@pytest.mark.parametrize("rank", EVERY)
def test_a_later_one_that_is_damaged_displaces_none_that_is_intact(rank: int, launch: tuple) -> None:
    seen = launch[1][rank]["a later one is damaged"]
    assert seen["after"] == [2, 3], "with keep_last = 1 the new one is kept, the damaged one left to look at"
    assert seen["end"] == [3], "until it is written again"


def test_an_old_one_that_cannot_be_removed_is_a_warning(launch: tuple) -> None:
    out, found = launch
    root = out / "an old one stays" / "checkpoints"
    for rank in EVERY:
        seen = found[rank]["an old one stays"]
        assert (seen["error"], seen["after"], seen["last"]) == (None, [1, 2], 2)
        assert (seen["end"], seen["leftovers"]) == ([3], [])
    assert found[0]["an old one stays"]["reports"][-1] == (
        like(f"warning: an old checkpoint cannot be removed: {root / 'step_000001'}: Directory not empty")
    )


@pytest.mark.parametrize("rank", EVERY)
def test_an_iteration_is_saved_again_where_nobody_knows_that_it_was(rank: int, launch: tuple) -> None:
    assert launch[1][rank]["it is saved again"] == {"end": [1], "score": 0.75}


@pytest.mark.parametrize("rank", EVERY)
def test_names_of_seven_digits(rank: int, launch: tuple) -> None:
    assert launch[1][rank]["a million iterations"] == {"end": [1_000_001], "names": ["latest", "step_1000001"]}


@pytest.mark.parametrize("rank", EVERY)
def test_seconds_that_training_waits_are_counted_once(rank: int, launch: tuple) -> None:
    for counted, passed in launch[1][rank]["seconds are counted once"].values():
        assert 0.5 * passed < counted <= passed
