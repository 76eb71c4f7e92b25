"""Reserved addresses on a simulated device: alone, and under whole hand-offs of four ranks."""

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from hybridflow.architecture.parts import shard_shape
from hybridflow.placement.reshard import ReshardForecast
from hybridflow.reshard import execute
from hybridflow.reshard import slices as parcels
from hybridflow.reshard.execute import WeightReshard
from hybridflow.reshard.plan import ReshardPlan, Way
from hybridflow.reshard.reserved import Reserved
from tests.placement.test_reshard import ALONE_ELEMENTS, CASES, NUM_RANKS, SPEC, make_plan
from tests.reshard.simulated import SimulatedDevice

NUM_HAND_OFFS = 5
PAGE = 4096  # beside 256 bytes, to which every weight of the engine's own memory is aligned


def test_the_address_stays_and_the_memory_does_not() -> None:
    device = SimulatedDevice()
    one, other = Reserved(1000, device), Reserved(256, device)
    assert (one.size, other.size, device.num_bytes) == (1024, 256, 0)
    one.map()
    x = one.tensor().view(torch.float32)
    for i in range(50):
        x.fill_(i)
        assert x.data_ptr() == one.address and bool((x == i).all())
        one.unmap()
        other.map()
        assert device.num_bytes == 256
        other.unmap()
        one.map()
        assert bool(x.isnan().all())  # what was there is gone
    assert device.peak == 1024 and device.num_maps == 101


def test_nothing_is_mapped_twice_nor_unmapped_twice() -> None:
    device = SimulatedDevice()
    reserved = Reserved(10, device)
    with pytest.raises(AssertionError, match="are not mapped"):
        reserved.unmap()
    with pytest.raises(AssertionError, match="torch asks the device"):
        reserved.tensor()
    reserved.map()
    with pytest.raises(AssertionError, match="are mapped already"):
        reserved.map()
    reserved.unmap()
    with pytest.raises(AssertionError, match="are not mapped"):
        reserved.unmap()
    assert device.num_maps == 1 and not device.mapped


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.slow
def test_a_range_is_given_up_with_the_last_tensor_over_it(mapped: bool) -> None:
    device = SimulatedDevice()
    reserved = Reserved(64, device)
    reserved.map()
    view = reserved.tensor()[3:5].view(2, 1)
    if not mapped:
        reserved.unmap()
    del reserved
    gc.collect()
    assert device.num_reserved == 1 and len(device.mapped) == mapped
    del view
    gc.collect()
    assert device.num_reserved == 0 and not device.mapped


def test_a_full_device_is_asked_for_what_others_hold_without_use() -> None:
    device = SimulatedDevice(capacity=1024)
    device.cached = 512
    first, second = Reserved(512, device), Reserved(512, device)
    first.map()
    assert device.num_reclaims == 0
    second.map()
    assert device.num_reclaims == 1 and device.num_bytes == 1024
    third = Reserved(1, device)
    with pytest.raises(torch.OutOfMemoryError):
        third.map()
    assert not third.is_mapped and device.num_bytes == 1024
    first.unmap()
    third.map()
    assert device.num_bytes == 768


# ------------------------------------------------------------------------------------------------ hand-offs


class Watched(WeightReshard):
    """Notes what lies on the device beyond what the reshard counts, whenever it counts."""

    def __init__(self, *arguments: Any, space: SimulatedDevice, **named: Any) -> None:
        super().__init__(*arguments, space=space, **named)
        self.device, self.beyond, self.short = space, [0], [0]

    def _changed(self, num_bytes: int) -> None:
        super()._changed(num_bytes)
        training = sum(
            {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in self._weights.values()}.values()
        )
        self.beyond.append(training + self.device.num_bytes - self._live)
        self.short.append(self._live - training - self.device.num_bytes)


def contents(reshard: WeightReshard, plan: ReshardPlan, rank: int) -> dict[str, Tensor]:
    return {o.weight.engine: reshard.engine_tensor(o.weight.engine) for o in plan.operations(rank)}


def hand_offs(plan: ReshardPlan, rank: int, page_bytes: int) -> dict[str, Any]:
    """What several of them do on this rank, beside those with torch's memory."""
    generator = torch.Generator().manual_seed(rank)
    weights = {
        w.megatron: torch.rand(shard_shape(w, SPEC, plan.train.cut), generator=generator)
        for w in plan.trained_weights(rank)
    }
    named = {"rank": rank, "dtype": torch.float32, "device": torch.device("cpu"), "group": dist.group.WORLD}
    device = SimulatedDevice(page_bytes)
    reshard, plain = Watched(plan, weights, space=device, **named), WeightReshard(plan, weights, **named)
    engine, expected = contents(reshard, plan, rank), contents(plain, plan, rank)
    addresses = {name: x.data_ptr() for name, x in engine.items()}
    found: dict[str, Any] = {"left_after_building": device.num_bytes, "peak": 0, "own": set(), "left": set()}
    found |= {"same": True, "stay": True, "restored": True, "prepared": 0, "prepared_again": 0}
    for turn in range(NUM_HAND_OFFS):
        prepared = mock.patch.object(execute, "prepared_copies", wraps=execute.prepared_copies).start()
        before = {name: x.add_(1).clone() for name, x in weights.items()}
        plain.to_engine()
        right = {name: x.clone() for name, x in expected.items()}
        plain.to_trainer()
        there = reshard.to_engine()
        found["own"].add(device.num_bytes)
        found["same"] &= all(torch.equal(right[name], engine[name]) for name in right)
        found["stay"] &= addresses == {name: x.data_ptr() for name, x in engine.items()}
        back = reshard.to_trainer()
        found["left"].add(device.num_bytes)
        found["restored"] &= all(torch.equal(before[name], x) for name, x in weights.items())
        found["peak"] = max(found["peak"], there.peak_extra_bytes, back.peak_extra_bytes)
        mock.patch.stopall()
        found["prepared" if turn == 0 else "prepared_again"] += prepared.call_count
    steps = sum(bool(step.memory.operations) for step in reshard._steps)
    found |= {"beyond": max(reshard.beyond), "short_at_end": reshard.short[-1], "num_steps": steps}
    found |= {"num_maps": device.num_maps, "num_reserved": device.num_reserved}
    del reshard, engine
    gc.collect()
    return found | {"leaked": device.num_reserved + device.num_bytes}


def measure(rank: int, out: str) -> None:
    parcels.ALONE_ELEMENTS = ALONE_ELEMENTS
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=NUM_RANKS)
    plans = [make_plan(*case) for case in CASES]
    torch.save([[hand_offs(plan, rank, page) for plan in plans] for page in (256, PAGE)], f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[dict[str, Any]]]]:
    """rank -> page size -> case"""
    out = tmp_path_factory.mktemp("reserved")
    processes.spawn(measure, (str(out),), nprocs=NUM_RANKS)
    return [torch.load(out / f"{rank}.pt") for rank in range(NUM_RANKS)]


EACH_CASE = pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))


@pytest.mark.thorough
@EACH_CASE
def test_the_engine_finds_its_weights_where_they_were(measured: list, number: int) -> None:
    for rank in measured:
        for pages in rank:
            seen = pages[number]
            assert seen["stay"] and seen["same"] and seen["restored"]


@pytest.mark.slow
def test_what_travels_is_prepared_once(measured: list) -> None:
    """In the first hand-off; all later ones copy what was prepared then."""
    seen = [pages[number] for rank in measured for pages in rank for number in range(len(CASES))]
    assert all(x["prepared_again"] == 0 for x in seen) and any(x["prepared"] > 0 for x in seen)


@pytest.mark.slow
@EACH_CASE
def test_memory_is_there_for_as_long_as_the_engine_needs_it(measured: list, number: int) -> None:
    """Each bucket is mapped once when it is made and once a hand-off, and nothing of it is left behind."""
    for rank in measured:
        for pages in rank:
            seen = pages[number]
            assert seen["left"] == {0} and seen["left_after_building"] == 0 and seen["leaked"] == 0
            assert seen["num_maps"] == seen["num_steps"] * (1 + NUM_HAND_OFFS)
            assert seen["num_reserved"] == seen["num_steps"]


@pytest.mark.slow
@EACH_CASE
def test_the_peak_is_the_planned_one(measured: list, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte where pages add nothing; else there is one more a bucket at most."""
    monkeypatch.setattr(parcels, "ALONE_ELEMENTS", ALONE_ELEMENTS)
    forecast = ReshardForecast(make_plan(*CASES[number]), SPEC, itemsize=4, bucket_elements=0)
    for rank, memory in forecast.memory.items():
        fine, coarse = (pages[number] for pages in measured[rank])
        assert (fine["own"], fine["peak"]) == ({memory.own}, memory.peak_extra)
        (own,) = coarse["own"]
        assert memory.own <= own <= memory.own + PAGE * coarse["num_steps"]
        assert coarse["peak"] <= memory.peak_extra + PAGE * coarse["num_steps"]
        for seen in (fine, coarse):  # nothing lies on the device that is not counted
            assert seen["beyond"] == 0 == seen["short_at_end"]


def test_the_cases_have_weights_that_are_gathered_beside_some_that_are_not() -> None:
    ways = [{o.way for rank in range(NUM_RANKS) for o in make_plan(*case).operations(rank)} for case in CASES]
    assert any(Way.GATHER in found and len(found) > 1 for found in ways) and sum(Way.GATHER in x for x in ways) > 3
