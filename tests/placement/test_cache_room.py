"""The default size of the KV cache by hand: by the batch's expected lengths, or by the memory that is free for it."""

import json
from pathlib import Path

import pytest
import yaml

from hybridflow.cli.plan import main
from hybridflow.config.kinds import load_config
from hybridflow.errors import ConfigError
from hybridflow.placement.cache_room import (
    bytes_left,
    cache_report,
    cache_words,
    long_words,
    sized_here,
    with_room,
)
from hybridflow.placement.forecast import fullest
from hybridflow.placement.placed import PlacedRun, place

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
LONGEST, EXPECTED = 32768, 8192
# of Llama 3 8B's shape on an engine of tp 2: 16 tokens x 2 x 32 layers x 4 heads x 128 x 2 bytes
BLOCK = 16 * 2 * 32 * 4 * 128 * 2
LIBRARIES = GIB // 2 + 5 * (3 * GIB // 10) + 32 * (39 * GIB // 1600) + 3 * GIB // 2 + 6 * GIB // 10  # 4.88 GiB
BLOCKS = (1024 + LONGEST) // 16, (1024 + EXPECTED) // 16
ROLES = ("actor", "critic", "reference", "reward.models.0")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with long.yaml: 256 prompts on 4 engine replicas, responses of up to 32k tokens."""
    for name in ("llama-3-8b", "llama-3-8b-reward"):
        shape = json.loads((ROOT / "configs" / "shapes" / name / "config.json").read_text())
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 65536}))
    tree = yaml.safe_load((ROOT / "configs" / "llama3_8b_8gpus.yaml").read_text())
    for role in (tree["actor"], tree["critic"], tree["reference"], *tree["reward"]["models"]):
        role |= {"model": Path(role["model"]).name, "micro_batch_tokens": 1024 + LONGEST}
    for name in ("actor", "critic"):
        tree[name]["recompute"] = "full"
    del tree["rollout"]["kv_cache_gib"]
    tree["sampling"]["max_response_length"] = LONGEST
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_of(*overrides: str) -> PlacedRun:
    return place(load_config("long.yaml", list(overrides)), 8, cuda=True)  # type: ignore[arg-type]  # it generates


def test_the_need_of_the_batch_goes_by_the_expected_length() -> None:
    """64 prompts a replica; vLLM keeps a block."""
    whole = run_of().kv_cache
    assert whole.whole == (64 * BLOCKS[0] + 1) * BLOCK
    expected = run_of(f"sampling.expected_response_length={EXPECTED}").kv_cache
    assert expected.whole == (64 * BLOCKS[1] + 1) * BLOCK
    assert whole.least == expected.least == (BLOCKS[0] + 1) * BLOCK


def test_a_default_that_is_too_large_takes_what_is_free() -> None:
    run = run_of()
    beside = fullest(run).bytes - run.kv_cache.whole  # in generation, which the cache makes the fullest moment
    room = 76 * GIB + LIBRARIES
    found = with_room(run, room)
    assert bytes_left(run, room) == found.kv_cache.whole == 76 * GIB - beside
    assert fullest(found).needed == room
    small = run_of(f"sampling.expected_response_length={EXPECTED}")
    assert with_room(small, room) == small
    given = run_of("rollout.kv_cache_gib=100")
    assert with_room(given, room) is given
    # with room for nothing one sequence is planned: the verdict says what is missing
    assert with_room(run, 0).kv_cache.whole == run.kv_cache.least


def test_an_engine_of_stages_is_bounded_by_its_largest(tmp_path: Path) -> None:
    """Of 32 layers on 3 stages 11, 11 and 10: each with its part of the cache."""
    run = run_of("rollout.tensor_parallel_size=1", "rollout.pipeline_parallel_size=4")
    found = with_room(run, 76 * GIB)
    assert 0 <= 76 * GIB - fullest(found).needed < 4


def test_on_a_gpu_the_tighter_of_what_is_planned_and_what_is_free_counts() -> None:
    run = run_of()
    planned = bytes_left(run, 80 * GIB)
    assert sized_here(run, memory=80 * GIB, free=79 * GIB, beside=GIB).whole == planned
    later = LIBRARIES - GIB // 2 - 5 * (3 * GIB // 10)  # context and communicators are there already
    assert sized_here(run, memory=80 * GIB, free=30 * GIB, beside=GIB).whole == 30 * GIB - GIB - later
    with pytest.raises(ConfigError, match="not given, and the 1,073,741,824 bytes"):
        sized_here(run, memory=80 * GIB, free=2 * GIB + later, beside=GIB)
    given = run_of("rollout.kv_cache_gib=24")
    assert sized_here(given, memory=80 * GIB, free=GIB, beside=GIB) is given.kv_cache


def test_it_says_how_many_sequences_the_cache_holds() -> None:
    """24 GiB are 24,576 blocks of 1 MiB, of which vLLM keeps one: 2,112 for one of the longest, 576 of the expected."""
    run = run_of("rollout.kv_cache_gib=24", f"sampling.expected_response_length={EXPECTED}")
    assert BLOCK == 1 << 20 and BLOCKS == (2112, 576)
    found = cache_report(run)
    assert (found["longest_sequences"], found["expected_sequences"]) == (24575 // 2112, 24575 // 576) == (11, 42)
    assert cache_words(run) == (
        "KV cache: 24 GiB a rank (given): 11 sequences of the longest 33,792 tokens, 42 of the expected 9,216"
    )
    default = with_room(run_of(), 76 * GIB)
    assert "(default, 4.88 GiB stay free): " in cache_words(default)


def test_it_says_what_the_longest_sequence_takes() -> None:
    run = run_of("rollout.kv_cache_gib=24")
    found = cache_report(run)
    assert (found["longest_bytes"], found["prompt_steps"]) == (BLOCKS[0] * BLOCK, 1)
    takes = "One of the longest sequences takes 2.062 GiB of each of the 2 tensor-parallel ranks"
    assert long_words(run) == takes
    few = ["rollout.kv_cache_gib=24", "rollout.max_num_batched_tokens=512"]
    assert long_words(run_of(*few)) == (
        f"{takes}. The engine reads a prompt of 1,024 tokens in 2 steps of at most 512 tokens: "
        "rollout.max_num_batched_tokens"
    )
    on_cpus = place(load_config("long.yaml", few), 8, cuda=False)  # type: ignore[arg-type]  # it generates
    assert cache_report(on_cpus)["prompt_steps"] == 1, "there a prompt is not cut"


def test_a_default_that_no_memory_bounds_says_so() -> None:
    unbounded = cache_words(run_of(), bounded=False)
    assert " (default): " in unbounded
    assert unbounded.endswith("no device memory is known: a run takes at most what is free")
    given = run_of("rollout.kv_cache_gib=24")
    assert cache_words(given, bounded=False) == cache_words(given)


@pytest.mark.parametrize(("arguments", "bounded"), [((), False), (("--memory-gib", "80"), True)])
def test_a_plan_says_whether_memory_bounds_the_cache(
    arguments: tuple[str, ...], bounded: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridflow.trainers.auto.facts_of_gpus", lambda tree: None)
    assert main(["long.yaml", "--world-size", "8", "--json", *arguments]) == 0, capsys.readouterr().err
    line = json.loads(capsys.readouterr().out)["kv_cache"]["line"]
    assert ("no device memory is known" in line) is not bounded


def test_the_plan_and_its_time_take_the_default_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["long.yaml", "--world-size", "8", "--json"]
    assert main([*arguments, "--memory-gib", "80", "--time"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["kv_cache"]["bytes"]
        == found["memory"]["generation"]["roles"]["engine"]["kv_cache"]
        < 80 * GIB - LIBRARIES
    )
    assert found["verdict"]["fits"] and found["verdict"]["bytes"] <= 80 * GIB - LIBRARIES
    assert found["time"]["largest_batch"]["rows"] >= 256
    assert main(arguments) == 0  # no memory is known: what the batch needs, in the engine's blocks of a CPU
    assert json.loads(capsys.readouterr().out)["kv_cache"]["bytes"] == (64 * BLOCKS[0] // 2 + 1) * 2 * BLOCK


def test_a_cache_too_small_is_told_one_that_holds_some() -> None:
    """8 sequences of 2,112 blocks and vLLM's own, 1 MiB each: 16.5009765625 GiB, rounded up to four digits."""
    with pytest.raises(ConfigError) as raised:
        run_of("rollout.kv_cache_gib=0.1")
    assert "rollout.kv_cache_gib=16.51 holds 8 of the longest at a time, rollout.kv_cache_gib=2.064 one" in str(
        raised.value
    )
    assert run_of("rollout.kv_cache_gib=2.064").kv_cache.sequences(1024 + LONGEST) == 1
    assert run_of("rollout.kv_cache_gib=16.51").kv_cache.sequences(1024 + LONGEST) == 8
