"""The forecast of a reshard's memory against what `WeightReshard` counts on four ranks."""

from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from hybridflow.architecture.parts import shard_shape
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weights import embedding
from hybridflow.parallel.layout import Layout
from hybridflow.placement.reshard import ReshardForecast
from hybridflow.reshard import slices as parcels
from hybridflow.reshard.execute import WeightReshard
from hybridflow.reshard.groups import rollout_layout, standalone_layout
from hybridflow.reshard.plan import ReshardPlan, plan_reshard

SPEC = ModelSpec(
    path=Path("nowhere"),
    family="qwen2",
    head="lm",
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=128,
    norm_eps=1e-6,
    tied=False,
    max_positions=64,
)
NUM_RANKS = 4
TRAIN = {"tp2 pp2": (2, 2, 1), "tp2 dp2": (2, 1, 2), "tp4": (4, 1, 1), "dp4": (1, 1, 4), "apart": (2, 1, 1)}
# training layout, rollout tp and pp
CASES = [
    ("tp2 pp2", 1, 1),
    ("tp2 pp2", 2, 1),
    ("tp2 dp2", 4, 1),
    ("tp4", 2, 1),
    ("dp4", 2, 2),
    ("dp4", 1, 1),
    ("apart", 1, 1),
]
BUCKET_ELEMENTS = 6000
ALONE_ELEMENTS = 200  # so that pieces travel both alone and together


def make_plan(train: str, tp: int, pp: int) -> ReshardPlan:
    sizes = TRAIN[train]
    layout = Layout(*sizes, tuple(range(prod(sizes))))
    rollout = standalone_layout((2, 3), tp, pp) if train == "apart" else rollout_layout(layout, tp, pp)
    return plan_reshard(SPEC, layout, rollout, bucket_elements=BUCKET_ELEMENTS)


def measure(rank: int, out: str) -> None:
    """What each case takes on this rank, there and back."""
    parcels.ALONE_ELEMENTS = ALONE_ELEMENTS
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=NUM_RANKS)
    found = []
    for case in CASES:
        plan = make_plan(*case)
        weights = {w.megatron: torch.zeros(shard_shape(w, SPEC, plan.train.cut)) for w in plan.trained_weights(rank)}
        cpu, group = torch.device("cpu"), dist.group.WORLD
        reshard = WeightReshard(plan, weights, rank=rank, dtype=torch.float32, device=cpu, group=group)
        there, back = reshard.to_engine(), reshard.to_trainer()
        found.append(max(there.peak_extra_bytes, back.peak_extra_bytes))
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of each rank the peak of every case."""
    out = tmp_path_factory.mktemp("estimate")
    processes.spawn(measure, (str(out),), nprocs=NUM_RANKS)
    return [torch.load(out / f"{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_the_peak_is_what_the_reshard_counts(
    measured: list[list[int]], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "ALONE_ELEMENTS", ALONE_ELEMENTS)
    forecast = ReshardForecast(make_plan(*CASES[number]), SPEC, itemsize=4, bucket_elements=0)
    assert [memory.peak_extra for memory in forecast.memory.values()] == [peaks[number] for peaks in measured]


def test_ranks_without_weights_hold_only_the_engines_own() -> None:
    forecast = ReshardForecast(make_plan("apart", 1, 1), SPEC, itemsize=4, bucket_elements=0)
    assert [forecast.memory[rank].own > 0 for rank in range(NUM_RANKS)] == [False, False, True, True]
    assert all(memory.released == 0 for memory in forecast.memory.values())


def test_shared_storages_are_released_when_the_last_of_their_weights_has_moved() -> None:
    """One storage for everything stays until the end: the peak is higher than with one for each weight."""
    plan = make_plan("tp2 pp2", 1, 1)
    apart, joined = (ReshardForecast(plan, SPEC, itemsize=4, bucket_elements=n).memory[0] for n in (0, 1 << 30))
    assert apart.peak_extra < joined.peak_extra
    held = [prod(shard_shape(weight, SPEC, plan.train.cut)) for weight in plan.trained_weights(0)]
    assert joined.released == 4 * sum(held) > 4 * prod(shard_shape(embedding(SPEC), SPEC, plan.train.cut))
