"""`hybridflow plan`'s last line: whether the run fits, on which rank and in which moment, and what would help."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridflow.cli.plan import main
from hybridflow.parallel.device import CHOSEN

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
CONFIG = "configs/llama3_8b_8gpus.yaml"
# by hand: a context, 5 communicators (the world, tp, dp, all of the actor, vLLM's), 32 layers of graphs, workspaces
LIBRARIES = GIB // 2 + 5 * (3 * GIB // 10) + 32 * (39 * GIB // 1600) + 3 * GIB // 2 + 6 * GIB // 10  # 4.88 GiB


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str, status: int) -> dict:
        assert main([CONFIG, "--json", *arguments]) == status, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def last_line(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str, status: int) -> str:
        assert main([CONFIG, *arguments]) == status, capsys.readouterr().err
        return capsys.readouterr().out.splitlines()[-1]

    return run


def fullest_of(found: dict) -> tuple[int, int, str]:
    worst = {moment: rows["worst_rank"] for moment, rows in found["memory"].items()}
    moment = max(worst, key=lambda each: worst[each]["total"])
    return worst[moment]["total"], worst[moment]["rank"], moment


def test_the_last_byte_decides(plan) -> None:
    """Room is what is given, less what libraries take."""
    size, rank, moment = fullest_of(plan(status=0))
    for spare, status in ((0, 0), (-1, 3)):
        found = plan("--memory-gib", repr((size + LIBRARIES + spare) / GIB), status=status)["verdict"]
        assert (found["fits"], found["rank"], found["moment"]) == (not status, rank, moment)
        assert (found["bytes"], found["left_bytes"]) == (size, spare)


def test_a_plan_that_fits_tells_what_is_left(last_line) -> None:
    """60.60 GiB as in the table of memory: 80 - 4.88 - 60.60."""
    line = last_line("--memory-gib", "80", status=0)
    assert line.startswith("Fits: rank 0 in training is fullest: 60.6 of 75.12 GiB (80 less 4.88 for libraries: ")
    assert "CUDA's context 0.50, 5 communicators 1.50, CUDA graphs 0.78, workspaces 2.10); " in line
    assert line.endswith("14.52 GiB are left.")


def test_the_memory_of_a_profile_is_known(last_line) -> None:
    assert "of 75.12 GiB (80 less 4.88 " in last_line("--profile", "h100-sxm", status=0)
    assert last_line("device_profile=l40s", status=3).startswith("Does not fit: rank 0 in training needs 60.6 GiB, ")


def test_memory_that_is_given_goes_before_that_of_a_profile(plan) -> None:
    assert plan("--profile", "h100-sxm", "--memory-gib", "40", status=3)["verdict"]["memory_bytes"] == 40 * GIB


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="the GPUs here have a memory")
def test_a_machine_without_gpus_knows_its_own_memory(last_line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared by the ranks. The config may be meant for another machine: the status is 0 where it does not fit."""
    monkeypatch.setattr("hybridflow.parallel.host_memory.host_memory", lambda: (16 * GIB, 32 * GIB))
    line = last_line(status=0)
    assert line.startswith(
        "This machine has no GPU, and 4 GiB of memory for each of 8 ranks, of which libraries take 1. "
    )
    assert "Here the run does not fit: rank 0 in training needs 60.6 GiB. " in line
    assert line.endswith(" For GPUs give --memory-gib, --profile, or device_profile in the config.")
    monkeypatch.setattr("hybridflow.parallel.host_memory.host_memory", lambda: (16 * GIB, 8 * 70 * GIB))
    assert "Here the run fits: rank 0 in training is fullest, with 60.6 GiB. " in last_line(status=0)
    assert last_line("platform=cuda", status=0).startswith("No verdict: no device memory is known.")


def test_the_gpus_that_are_here_have_a_memory(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated H100 of 79 GiB: the verdict goes by the smallest that fits, without an option."""
    monkeypatch.delenv(CHOSEN, raising=False)  # a test before this one may have chosen CPUs for its process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    here = SimpleNamespace(total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: here)
    found = plan(status=0)["verdict"]
    assert (found["memory_bytes"], found["room_bytes"]) == (79 * GIB, 79 * GIB - LIBRARIES)
    assert found["left_bytes"] == found["room_bytes"] - found["bytes"]
    here.total_memory = 40 * GIB
    assert plan(status=3)["verdict"]["memory_bytes"] == 40 * GIB


def test_a_cache_that_fits_is_told_to_a_hundredth(plan, last_line) -> None:
    """Generation holds 19.03 GiB beside the cache (43.03 with 24): 75.12 - 19.03 = 56.09 GiB are left for it."""
    arguments = ("--memory-gib", "80", "rollout.kv_cache_gib=70")
    found = plan(*arguments, status=3)
    held = found["memory"]["generation"]["worst_rank"]["total"] - 70 * GIB
    told = found["verdict"]["help"]["alone"]["rollout.kv_cache_gib"]
    assert told == int(100 * (80 * GIB - LIBRARIES - held) / GIB) / 100 == 56.08
    line = last_line(*arguments, status=3)
    assert "Does not fit: rank 0 in generation needs 89.03 GiB, 13.91 more than 75.12 GiB" in line
    assert "Would help: rollout.kv_cache_gib=56.08;" in line
    plan(*arguments, f"rollout.kv_cache_gib={told}", status=0)
    plan(*arguments, f"rollout.kv_cache_gib={told + 0.01}", status=3)


BIG = ("--memory-gib", "80", "actor.recompute=none", "critic.recompute=none", "actor.micro_batch_tokens=65536")


@pytest.mark.thorough
def test_each_change_that_is_told_is_enough(plan, last_line) -> None:
    found = plan(*BIG, status=3)["verdict"]["help"]
    modules = ["core_attn", "layernorm", "mlp"]
    assert found["alone"] == {"actor.micro_batch_tokens": 2048, "actor.recompute": modules}
    assert "actor.recompute=[core_attn,layernorm,mlp]" in last_line(*BIG, status=3)
    plan(*BIG, "actor.recompute=selective", status=3)
    for key, value in found["alone"].items():
        plan(*BIG, f"{key}={value}", status=0)


@pytest.mark.thorough
def test_changes_that_are_enough_together(plan) -> None:
    """Nothing of two large micro-batches may stay."""
    both = (*BIG, "critic.micro_batch_tokens=65536")
    found = plan(*both, status=3)["verdict"]["help"]
    assert not found["alone"] and found["ranks"] is None
    assert {key.split(".")[0] for key in found["together"]} == {"actor", "critic"} and len(found["together"]) == 2
    plan(*both, *(f"{key}={value}" for key, value in found["together"].items()), status=0)


@pytest.mark.thorough
def test_more_ranks_where_no_change_suffices(plan) -> None:
    """On CPUs, where the optimizer's state has no other memory to lie in."""
    given = ("platform=cpu", "--profile", "cpu", "--memory-gib", "34")
    found = plan(*given, status=3)["verdict"]["help"]
    assert (found["alone"], found["ranks"]) == ({}, 16)
    changes = [f"{key}={value}" for key, value in found["together"].items()]
    plan(*given, "--world-size", "16", "actor.data_parallel_size=null", *changes, status=0)


def test_what_does_not_ask_for_memory_has_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([CONFIG, "--smallest", "--memory-gib", "5"]) == 0
    assert capsys.readouterr().out == "8\n"
    assert main([CONFIG, "--for-launch", "--hosts", "a=8", "--memory-gib", "5"]) == 0


def test_the_batch_that_fits_follows_the_memory(plan) -> None:
    found = plan("--time", "--profile", "h100-sxm", "--memory-gib", "70", status=0)["time"]["largest_batch"]
    assert found["room"] == 70 * GIB


def test_a_mixture_is_told_to_share_its_experts_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The same tensor-parallel size, and whole experts on all 8 ranks: as the shipped config has it."""
    arguments = ["configs/qwen3_30b_a3b_8gpus.yaml", "--world-size", "8", "--memory-gib", "48"]
    arguments += ["actor.recompute=full", "actor.micro_batch_tokens=4096"]
    assert main([*arguments, "actor.expert_parallel_size=1", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"]["help"]["together"] == {"actor.expert_parallel_size": 8}
    assert main([*arguments, "actor.expert_parallel_size=8"]) == 0
