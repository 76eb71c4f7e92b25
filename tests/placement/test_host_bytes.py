"""Optimizer states in host memory: bytes on a device and on a host by hand, and what a start refuses."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from hybridflow.cli import refusals
from hybridflow.config.kinds import load_config
from hybridflow.errors import ConfigError
from hybridflow.inspection.findings import Host
from hybridflow.inspection.fit import Free, fit_findings
from hybridflow.models import memory
from hybridflow.parallel import host_memory
from hybridflow.parallel.host_memory import PART_BYTES, packed_bytes, power_of_two
from hybridflow.placement.footprint import stage_optimizer_bytes, staged_bytes
from hybridflow.placement.forecast import memory_of
from hybridflow.placement.host_bytes import check_host_memory, fullest_host, host_bytes, host_report
from hybridflow.placement.hosts import HostRanks, equal_hosts
from hybridflow.placement.placed import PlacedModels, place
from hybridflow.placement.verdict import verdict

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
DENSE, MIXTURE, SFT = "llama3_8b_8gpus", "qwen3_30b_a3b_8gpus", "recipes/ultrachat_mistral_7b_sft"
# the actor: Llama 3 8B on tp 4 x dp 2; each tensor-parallel rank has whole norms; 12 bytes an element, over 2 copies
NORMS = 65 * 4096
ACTOR_STATE = 12 * ((8_030_261_248 - NORMS) // 4 + NORMS) // 2
# Qwen3 30B-A3B on tp 4 x ep 8 x dp 2: an eighth of all experts, of which there is one copy; of the rest, two
EXPERTS = 48 * 128 * 3 * 2048 * 768
SPLIT = 2 * 151_936 * 2048 + 48 * (2048 * (4096 + 2 * 512) + 4096 * 2048)
WHOLE = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
MIXTURE_STATE = 12 * EXPERTS // 8 + 12 * (SPLIT // 4 + WHOLE) // 2


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run_of(name: str, *overrides: str, ranks: int = 8, cuda: bool = True) -> PlacedModels:
    return place(load_config(f"configs/{name}.yaml", list(overrides)), ranks, cuda=cuda)


def blocks(state: int) -> int:
    return -(-state // PART_BYTES) * PART_BYTES


# ------------------------------------------------------------------------------------------------ devices


@pytest.mark.parametrize(("name", "state"), [(DENSE, ACTOR_STATE), (MIXTURE, MIXTURE_STATE)])
def test_two_parts_of_the_state_are_on_a_device(name: str, state: int) -> None:
    """While models train; in generation nothing, as with true."""
    for value, training, generation in (("false", state, state), ("true", state, 0), ("always", 512 << 20, 0)):
        moments = memory_of(run_of(name, f"actor.offload_optimizer={value}")).moments()
        assert moments["training"](0)["actor"].optimizer == training, value
        assert moments["generation"](0)["actor"].optimizer == generation, value


def test_a_state_of_less_than_two_parts_is_there_whole() -> None:
    assert [staged_bytes(size) for size in (0, 1, 1000, 512 << 20)] == [0, 1, 1000, 512 << 20]
    assert staged_bytes((512 << 20) + 1) == 512 << 20


def test_beside_an_engine_true_leaves_the_state_on_the_device_and_always_does_not() -> None:
    found = {}
    for value in ("false", "true", "always"):
        run = run_of("qwen3_8b_one_step_off_8gpus", f"actor.offload_optimizer={value}")
        actor = memory_of(run).moments()["training"](0)["actor"]
        found[value] = actor.optimizer
        assert actor.weights and actor.gradients
    (state,) = set(stage_optimizer_bytes(run.trained.spec, "lm", run.trained.layout, run.config.trained))
    assert found == {"false": state, "true": state, "always": 512 << 20} and state > 4 * GIB


# ------------------------------------------------------------------------------------------------ hosts


def test_host_bytes_of_a_dense_model_by_hand() -> None:
    """A state waits in blocks, of which the last has a power of two; in parts each block is as large as any."""
    found = host_bytes(run_of(DENSE, "actor.offload_optimizer=always", "critic.offload_optimizer=false"))
    assert found == [Counter({"actor.offload_optimizer=always": blocks(ACTOR_STATE)})] * 8
    found = host_bytes(run_of(DENSE, "actor.offload_optimizer=true", "critic.offload_optimizer=false"))
    rest = ACTOR_STATE % PART_BYTES
    waiting = ACTOR_STATE - rest + (1 << (rest - 1).bit_length())
    assert found == [Counter({"actor.offload_optimizer=true": waiting})] * 8
    none = ("actor.offload_optimizer=false", "critic.offload_optimizer=false")
    assert host_bytes(run_of(DENSE, *none)) == [Counter()] * 8
    assert host_report(run_of(DENSE, *none), equal_hosts(8, 8), GIB) == {}


def test_host_bytes_of_a_mixture_by_hand() -> None:
    run = run_of(MIXTURE)
    assert host_bytes(run)[7]["actor.offload_optimizer=always"] == blocks(MIXTURE_STATE) == 171 * PART_BYTES
    for per_host, gib in ((8, 350), (4, 175)):  # 171 / 4 GiB and 1 for libraries, a rank
        need = fullest_host(run, equal_hosts(8, per_host))
        assert (need.bytes, need.libraries) == (gib * GIB, per_host * GIB)
    words = "8 ranks take 350 GiB of the host's memory (actor.offload_optimizer=always 342, libraries 8)"
    assert fullest_host(run, equal_hosts(8, 8)).words == words


def test_stages_have_states_of_their_own_and_the_fullest_host_counts() -> None:
    """Of 8 stages, one a host, those in the middle have 12 layers, the first and the last 11 and the vocabulary."""
    run = run_of("qwen3_235b_a22b_64gpus", ranks=64)
    states = stage_optimizer_bytes(run.trained.spec, "lm", run.trained.layout, run.config.trained)
    of_ranks = [each["actor.offload_optimizer=always"] for each in host_bytes(run)]
    assert [of_ranks[8 * stage] for stage in range(8)] == [blocks(state) for state in states]
    need = fullest_host(run, equal_hosts(64, 8))
    assert need.bytes == 8 * (blocks(max(states)) + GIB) and need.host.name == "host 1"


def test_on_cpus_a_state_that_waits_takes_what_it_gives_back() -> None:
    assert host_bytes(run_of(DENSE, "actor.offload_optimizer=true", cuda=False)) == [Counter()] * 8
    (found,) = {sum(each.values()) for each in host_bytes(run_of(MIXTURE, cuda=False))}
    assert found == blocks(MIXTURE_STATE)
    assert fullest_host(run_of(MIXTURE, cuda=False), equal_hosts(8, 8)).libraries == 0


SIZES = [100, 200 << 20, 100 << 20, 100 << 20, 300 << 20, 64, 65]


def test_copies_of_a_save_lie_in_blocks_as_they_are_made() -> None:
    """The blocks of the code that makes them, of which no page is touched; page-locked ones have a power of two."""
    tensors = list(memory.host_tensors([((size,), torch.uint8) for size in SIZES]))
    made = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert packed_bytes(SIZES, locked=False) == sum(made.values())
    assert packed_bytes(SIZES, locked=True) == sum(map(power_of_two, made.values())) > sum(made.values())


def test_copies_of_a_save_are_counted() -> None:
    run = run_of(DENSE, "checkpoint.async_save=true")
    for each in host_bytes(run):
        copies = each["checkpoint.async_save=true"]
        # 14 bytes an element of actor and critic, over 8 ranks
        written = 14 * (2 * 8_030_261_248 - 128_256 * 4096) / 8
        assert written < copies < 1.35 * written


# ------------------------------------------------------------------------------------------------ a start


def test_a_start_is_refused_where_the_host_has_too_little() -> None:
    run, host = run_of(MIXTURE), HostRanks("worker-3", range(8))
    check_host_memory(run, host, 350 * GIB)
    with pytest.raises(ConfigError) as error:
        check_host_memory(run, host, 350 * GIB - 1)
    assert str(error.value) == (
        "worker-3: 8 ranks take 350 GiB of the host's memory (actor.offload_optimizer=always 342, libraries 8), "
        "350 GiB are available. Set actor.offload_optimizer=false, or take hosts with more memory"
    )
    saving = run_of(MIXTURE, "checkpoint.async_save=true")
    taken = fullest_host(saving, [host])
    with pytest.raises(
        ConfigError, match=r"Set actor\.offload_optimizer=false, or"
    ):  # the one that takes least suffices
        check_host_memory(saving, host, taken.bytes - GIB)
    with pytest.raises(ConfigError, match=r"Set checkpoint\.async_save=false, or"):
        check_host_memory(saving, host, taken.bytes - 343 * GIB)
    with pytest.raises(ConfigError, match=r"Set actor\.offload_optimizer=false checkpoint\.async_save=false, or"):
        check_host_memory(saving, host, 100 * GIB)


def test_what_ran_before_on_cpus_is_not_refused() -> None:
    """However little memory there is."""
    for overrides in (
        ("actor.offload_optimizer=true", "checkpoint.async_save=true"),
        ("actor.offload_optimizer=false",),
    ):
        check_host_memory(run_of(DENSE, *overrides, cuda=False), HostRanks("a", range(8)), 0)
    check_host_memory(
        run_of(DENSE, "actor.offload_optimizer=false", "critic.offload_optimizer=false"), HostRanks("a", range(8)), 0
    )


def test_train_looks_at_this_host_and_plan_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIXTURE is of GPUs: platform=cpu has the same check of a state in host memory, without libraries."""
    monkeypatch.setattr(refusals, "host_memory", lambda: (341 * GIB, 900 * GIB))
    monkeypatch.setattr(refusals, "note_missing", lambda *_, **__: None)
    config = load_config(f"configs/{MIXTURE}.yaml", ["platform=cpu"])
    refusals.check_here(config, 8)
    refusals.check_here(config, 8, reads=False, ranks=range(8))
    refusals.check_here(config, 8, ranks=range(4))
    with pytest.raises(
        ConfigError, match=r": 8 ranks take 342 GiB of the host's memory .* 341 GiB are available\. Set "
    ):
        refusals.check_here(config, 8, ranks=range(8))


def test_available_memory_has_what_files_have_in_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of version 2, and of version 1, whose sums have groups below."""
    monkeypatch.setattr(host_memory, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {9 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    assert host_memory.host_memory() == (8 * GIB, 9 * GIB)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{6 * GIB}\n")
    (group / "memory.current").write_text(f"{5 * GIB}\n")
    assert host_memory.host_memory() == (GIB, 6 * GIB)
    (group / "memory.stat").write_text(f"anon 7\nfile {4 * GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}\n")
    assert host_memory.host_memory() == (4 * GIB, 6 * GIB)
    (group / "memory").mkdir()
    (group / "memory/memory.limit_in_bytes").write_text(f"{3 * GIB}")
    (group / "memory/memory.usage_in_bytes").write_text(f"{2 * GIB}")
    (group / "memory/memory.stat").write_text(f"inactive_file 0\nactive_file 0\ntotal_inactive_file {GIB}\n")
    assert host_memory.host_memory() == (2 * GIB, 3 * GIB)


def test_the_health_check_looks_at_hosts_of_gpus() -> None:
    config, hosts = load_config(f"configs/{MIXTURE}.yaml"), (Host("a", 0, tuple(range(8))),)
    gpus = dict.fromkeys(range(8), 80 * GIB)
    for available, status in ((350, "ok"), (349, "fail")):
        found = fit_findings(config, 8, hosts, Free(gpus, {"a": available * GIB}, {}))
        (memory_line,) = [finding for finding in found if finding.name == "memory"]
        assert memory_line.status == status
        assert memory_line.figures == {"needed_bytes": 350 * GIB, "available_bytes": available * GIB}
    assert memory_line.advice.startswith("Set actor.offload_optimizer=false")


# ------------------------------------------------------------------------------------------------ advice


ONE_RANK = ("actor.tensor_parallel_size=1", "actor.sequence_parallel=false", "actor.data_parallel_size=1")


def test_a_run_that_fits_only_with_it_is_told_so() -> None:
    """SFT of 7 B on one GPU: 27 GiB of gradients, 13 of weights, 81 of state."""
    found = verdict(run_of(SFT, *ONE_RANK, ranks=1), 80 * GIB)
    assert not found.fits and found.alone == (("actor.offload_optimizer", "always"),)
    after = verdict(run_of(SFT, *ONE_RANK, "actor.offload_optimizer=always", ranks=1), 80 * GIB)
    assert after.fits and found.fullest.bytes - after.fullest.bytes > 80 * GIB
    on_cpus = verdict(run_of(SFT, *ONE_RANK, "platform=cpu", ranks=1, cuda=False), 80 * GIB)
    assert "actor.offload_optimizer" not in dict((*on_cpus.alone, *on_cpus.together))


def test_it_is_proposed_before_anything_is_computed_again() -> None:
    """Both suffice; the one that takes least time is told first. In generation true is enough."""
    keys = ("actor.offload_optimizer=true", "actor.recompute=selective", "actor.micro_batch_tokens=8192")
    found = verdict(run_of(MIXTURE, *keys), 80 * GIB)
    assert found.fullest.moment == "training"
    told = [("actor.micro_batch_tokens", 4096), ("actor.offload_optimizer", "always")]
    assert list(found.alone) == [*told, ("actor.recompute", ("core_attn", "layernorm", "moe_act"))]
    found = verdict(run_of(MIXTURE, "actor.offload_optimizer=false", *keys[1:]), 80 * GIB)
    assert found.fullest.moment == "generation"
    assert not found.alone and found.together == (("actor.offload_optimizer", "always"),)
    full = ("actor.offload_optimizer=false", "actor.recompute=full", *keys[2:])
    few = verdict(run_of(MIXTURE, *full), 75 * GIB)  # 66.7 in training and 5.3 for libraries
    assert few.fullest.moment == "generation" and few.alone[0] == ("actor.offload_optimizer", True)
