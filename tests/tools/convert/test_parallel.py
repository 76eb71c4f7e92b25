"""Several processes write the same checkpoint, and an error of one ends all with one message."""

import re
from pathlib import Path

import pytest

from hybridflow.convert.processes import Processes
from hybridflow.convert.survey import open_survey
from hybridflow.convert.to_huggingface import own_files, to_huggingface
from hybridflow.convert.to_megatron import make_plan, own_share, to_megatron
from hybridflow.convert.verify import verify
from tests.launch import run_ranks, torchrun
from tests.tools.convert.tiny import INDEX, Models, assert_same_bytes, left_in


def convert(num_ranks: int, *arguments: object) -> list[str]:
    """The lines that were printed."""
    return run_ranks(num_ranks, "tools.convert", *arguments).stdout.splitlines()


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_processes_write_the_same(models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", "qwen3_moe")
    alone, together = tmp_path / "alone", tmp_path / "together"
    to_megatron(source, alone / "megatron")
    to_huggingface(alone / "megatron", alone / "back", max_shard_bytes=100_000)
    first = convert(2, "hf-to-megatron", source, together / "megatron")
    size = ["--max-shard-size", "100KB"]
    second = convert(2, "megatron-to-hf", together / "megatron", together / "back", *size)
    assert len(first) == 2 and len(second) == 1, "one process prints"
    assert left_in(together / "megatron") == sorted([*left_in(alone / "megatron"), "__1_0.distcp"])
    assert verify(alone / "megatron", together / "megatron") == []
    assert left_in(together / "back") == left_in(alone / "back")
    for name in left_in(alone / "back"):
        assert (together / "back" / name).read_bytes() == (alone / "back" / name).read_bytes(), name
    assert INDEX in left_in(together / "back")
    assert_same_bytes(source, together / "back")
    assert convert(2, "verify", source, together / "megatron")[-1] == "equal"


@pytest.mark.thorough
@pytest.mark.distributed
def test_more_processes_than_files(source: Path, tmp_path: Path) -> None:
    convert(3, "hf-to-megatron", source, tmp_path / "megatron", "--value-head")
    convert(3, "megatron-to-hf", tmp_path / "megatron", tmp_path / "back")
    assert verify(tmp_path / "megatron", tmp_path / "back") == []


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("back", [False, True])
def test_an_error_of_one_process_ends_all(back: bool, failing: int, source: Path, tmp_path: Path) -> None:
    arguments = ["hf-to-megatron", source, tmp_path / "target"]
    if back:
        to_megatron(source, tmp_path / "megatron")
        arguments = ["megatron-to-hf", tmp_path / "megatron", tmp_path / "target", "--max-shard-size", "100KB"]
    before = left_in(tmp_path)
    done = run_ranks(2, "tests.tools.convert.failing_worker", failing, *arguments, check=False)
    assert done.returncode != 0
    assert len(re.findall(r"^tools.convert: error: .*: the disk is on fire$", done.stderr, re.MULTILINE)) == 1, (
        done.stderr
    )
    assert len(re.findall("^tools.convert: error: ", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert left_in(tmp_path) == before


@pytest.mark.thorough
@pytest.mark.distributed
def test_an_error_that_all_processes_meet_is_said_once(tmp_path: Path) -> None:
    arguments = ("hf-to-megatron", tmp_path / "absent", tmp_path / "target")
    done = torchrun(2, "-m", "tools.convert", *arguments, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("tools.convert: error: ")]
    assert lines == [f"tools.convert: error: {tmp_path / 'absent'}: no such directory"]
    assert done.stderr.count("Traceback") == 1, done.stderr  # torchrun's own


@pytest.mark.thorough
@pytest.mark.distributed
def test_forward_wants_one_process(source: Path) -> None:
    done = run_ranks(2, "tools.convert", "verify", source, source, "--forward", check=False)
    assert "error: --forward runs in one process: start it without torchrun" in done.stderr


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_every_chunk_and_file_has_one_process(num_ranks: int, models: Models, tmp_path: Path) -> None:
    survey = open_survey(models.copy(tmp_path / "source", "mixtral"))
    chunks = make_plan(survey, value_head=False, lm_head=None).chunks
    ranks = [Processes(rank, num_ranks) for rank in range(num_ranks)]
    shares = [own_share(chunks, processes) for processes in ranks]
    assert [chunk for share in shares for chunk in share] == list(chunks)
    sizes = [sum(chunk.num_bytes for chunk in share) for share in shares]
    assert max(sizes) - min(sizes) <= 2 * max(chunk.num_bytes for chunk in chunks)
    plan = {name: f"file-{i % 5}" for i, name in enumerate(survey.weights)}
    files = [own_files(plan, survey.weights, processes) for processes in ranks]
    assert sorted(file for own in files for file in own) == [f"file-{i}" for i in range(5)]
    assert max(map(len, files)) - min(map(len, files)) <= 2
