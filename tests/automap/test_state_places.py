"""Optimizer states in host memory: seconds of a step by hand, and when a search takes them."""

from pathlib import Path

import pytest

from hybridflow.automap.cost import Device
from hybridflow.automap.device import DeviceProfile, load_profile
from hybridflow.automap.options import Options, everything
from hybridflow.automap.search import SearchRequest, search, specs_of
from hybridflow.automap.state_places import places
from hybridflow.automap.step_time import staging_cost
from hybridflow.automap.timing import offload_cost, predict, training_cost, work_of
from hybridflow.config import TrainedRoleConfig
from hybridflow.config.kinds import load_config
from hybridflow.placement.forecast import memory_of
from hybridflow.placement.placed import PlacedModels, place
from tests.automap.round_profile import profile

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
H100 = load_profile("h100-sxm")
SFT = ("configs/recipes/ultrachat_mistral_7b_sft.yaml", "actor.tensor_parallel_size=1", "actor.sequence_parallel=false")
GRPO = "configs/qwen3_30b_a3b_8gpus.yaml"
# Llama 3 8B on tp 4 x dp 2: elements of a rank, of which it steps half
ELEMENTS = (8_030_261_248 - 65 * 4096) // 4 + 65 * 4096
STATE = 12 * ELEMENTS // 2


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run_of(file: str, *overrides: str, ranks: int = 8) -> PlacedModels:
    return place(load_config(file, list(overrides)), ranks, cuda=True)


def staged(run: PlacedModels, device: DeviceProfile) -> float:
    model = run.trained
    assert isinstance(model.config, TrainedRoleConfig)
    return staging_cost(model.spec, model.layout, model.config, Device(device), head=model.head).seconds


# ------------------------------------------------------------------------------------------------ seconds


def test_a_step_takes_the_longer_of_the_link_and_of_the_passes() -> None:
    run = run_of("configs/llama3_8b_8gpus.yaml")
    one_way, passes, ends = STATE / 51.2e9, 28 * ELEMENTS / 2 / 3015e9, (512 << 20) / 51.2e9
    assert staged(run, H100) == pytest.approx(one_way - passes + ends)
    assert one_way > 20 * passes
    fast = H100.model_copy(update={"host_bandwidth": 1e14})  # the passes hide what travels
    assert staged(run, fast) == pytest.approx((512 << 20) / 1e14)
    shared = profile(shared={"products": 2.0, "memory": 1.5, "overhead": 2.0})  # no copy beside a step
    assert staged(run, shared) == pytest.approx(2 * STATE / 1e4)


def test_a_state_of_one_part_comes_before_the_step_and_goes_after_it() -> None:
    run = run_of("configs/qwen3_8b_lora_1gpu.yaml", "actor.lora.rank=4", ranks=1)
    state = 12 * (memory_of(run).moments()["training"](0)["actor"].gradients // 4)
    assert staged(run, profile(memory_bandwidth=1e15)) == pytest.approx(2 * state / 1e4, rel=1e-4)


def test_steps_take_it_in_place_of_the_rollout() -> None:
    """Two steps an iteration of GRPO; the state does not travel around the rollout."""
    runs = {value: run_of(GRPO, f"actor.offload_optimizer={value}") for value in ("false", "true", "always")}
    phases = {value: predict(run, H100).phases for value, run in runs.items()}
    work = work_of(runs["true"].config, H100)
    steps = [training_cost(run.trained, run.config, work, Device(H100)).seconds for run in runs.values()]
    assert steps[0] == steps[1] and steps[2] - steps[0] == pytest.approx(2 * staged(runs["always"], H100))
    for value, phase in phases.items():
        assert phase["actor_update"] == pytest.approx(steps[list(runs).index(value)])
    around = offload_cost(runs["true"].trained, Device(H100)).seconds
    assert around > 1.5
    assert around == pytest.approx(phases["true"]["reshard"] - phases["false"]["reshard"])
    assert phases["always"]["reshard"] == phases["false"]["reshard"]


# ------------------------------------------------------------------------------------------------ places


def places_of(run: PlacedModels, device: DeviceProfile = H100, *, cuda: bool = True) -> tuple[object, ...]:
    return places(run.trained, run.config, work_of(run.config, device), Device(device), cuda=cuda)


def test_true_is_left_out_where_always_is_as_fast() -> None:
    """One step an iteration has one way over the link, and true two; of many steps each has one."""
    one, many = (run_of(GRPO, f"algorithm.update.mini_batch_size={size}") for size in (512, 64))
    assert places_of(one) == (False, "always")
    assert places_of(many) == (False, True, "always")
    assert places_of(one, cuda=False) == (False, True)
    assert places_of(run_of("configs/qwen3_8b_one_step_off_8gpus.yaml")) == (False, "always")
    fixed = run_of(*SFT, ranks=4)
    assert places_of(fixed) == (False, "always") and places_of(fixed, cuda=False) == (False,)


def test_a_host_without_the_memory_has_none() -> None:
    run = run_of(GRPO)
    for gib, found in ((342, (False, "always")), (341, (False,))):
        assert places_of(run_of(GRPO, "algorithm.update.mini_batch_size=512"), with_host(gib)) == found
    assert memory_of(run).moments()["training"](0)["actor"].optimizer == 512 << 20


def with_host(gib: int) -> DeviceProfile:
    return H100.model_copy(update={"host_memory_bytes": gib * GIB})


# ------------------------------------------------------------------------------------------------ the search


def test_a_search_finds_what_fits_only_with_it() -> None:
    """SFT of 7 B on one GPU of 80 GiB: 81 GiB of state."""
    config = load_config(SFT[0], [*SFT[1:], "platform=cuda", "actor.data_parallel_size=1"])
    found = search(SearchRequest(config, 1, H100, 80 * GIB))
    assert found.given is None and found.plans
    assert all(plan.config.roles()["actor"].offload_optimizer == "always" for plan in found.plans)
    for plan in found.plans:
        assert plan.choice is None or plan.choice.bytes == plan.fullest.bytes <= 80 * GIB
        again = place(plan.config, 1, cuda=True)
        assert predict(again, H100, found.request.iteration).seconds == plan.seconds
    assert not search(SearchRequest(config, 1, with_host(80), 80 * GIB)).plans  # 1 GiB for libraries


def test_options_know_a_state_at_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is asked for first: what is kept of others is not taken for it."""
    config = load_config(GRPO, ["platform=cuda", "algorithm.update.mini_batch_size=64"])
    keys = frozenset({"offload_optimizer"})
    free = {name: keys if name == "actor" else frozenset[str]() for name in everything(config)}
    for order in ((False, True, "always"), ("always", True, False)):
        monkeypatch.setattr("hybridflow.automap.options.places", lambda *_, _order=order, **__: _order)
        options = Options(config, specs_of(config), H100, work=work_of(config, H100), free=free, cuda=True)
        found = {option.config.offload_optimizer: option for option in options.of_role("actor", 8)}
        assert set(found) == {False, True, "always"}
        for value, option in found.items():
            changes = [f"actor.offload_optimizer={str(value).lower()}", "algorithm.update.mini_batch_size=64"]
            run = run_of(GRPO, *changes)
            held = memory_of(run).moments()["training"](0)["actor"]
            assert option.held[0] == held.total - held.activations
            cost = training_cost(run.trained, run.config, work_of(config, H100), Device(H100))
            assert option.updating == pytest.approx(cost.seconds)
            assert option.alone == pytest.approx(offload_cost(run.trained, Device(H100)).seconds)
