"""The engine's experts on their way: which rank has those of which row and layer, and how many bytes went where."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, joined, response_mask, token_index
from hybridflow.models.prompt_groups import replica_rows
from hybridflow.models.routing import RoutingSizes
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.rollout.routing_records import Recorded, RoutingRecords
from tests.rollout.simulated_exchange import SimulatedExchange, SimulatedGroup, on_ranks

NUM_RANKS, NUM_LAYERS, CHOSEN = 4, 4, 2
SIZES = {"uint8": RoutingSizes(NUM_LAYERS, CHOSEN, 16), "int16": RoutingSizes(NUM_LAYERS, CHOSEN, 512)}
ACTORS = {
    "tp": Layout(2, 1, 2, (0, 1, 2, 3)),
    "pp": Layout(1, 2, 2, (0, 1, 2, 3)),
    "vpp": Layout(2, 2, 1, (0, 1, 2, 3), vpp=2),
    "two of four ranks": Layout(1, 1, 2, (2, 3)),
}
ENGINES = {
    "four": RolloutLayout(1, 1, ((0,), (1,), (2,), (3,))),
    "two": RolloutLayout(2, 1, ((0, 1), (2, 3))),
    "stages": RolloutLayout(1, 2, ((0, 1), (2, 3))),
    "beside": RolloutLayout(1, 1, ((0,), (1,))),
}


def kept_bytes(records: RoutingRecords) -> int:
    return sum(kept.nbytes for kept in records._kept.values())


def rollout(first: int = 0) -> RolloutBatch:
    """Three responses to each of three prompts."""
    lengths = torch.tensor([5, 9, 6, 7, 4, 8, 12, 3, 5]) + first
    prompts = torch.tensor([2, 2, 2, 3, 3, 3, 1, 1, 1])
    ids = torch.arange(int(lengths.sum())) % 7
    indices = torch.arange(3).repeat_interleave(3)
    mask = response_mask(lengths, prompts)
    return RolloutBatch(ids, lengths, prompts, indices, torch.zeros(9, dtype=torch.bool), mask, -ids.float())


def experts_of(batch: RolloutBatch, sizes: RoutingSizes, seed: int) -> Tensor:
    """(T, layers, k), of which each row's last token has no record."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.rand(len(batch.input_ids), NUM_LAYERS, sizes.num_experts, generator=generator)
    experts = every.topk(CHOSEN).indices.to(sizes.dtype)
    experts[batch.lengths.cumsum(0) - 1] = 0
    return experts


def recorded_by(rank: int, batch: RolloutBatch, experts: Tensor, engines: RolloutLayout) -> Recorded:
    """As the engine's ranks tell: rows in turn to the replicas, each stage its layers, other ranks nothing."""
    half = NUM_LAYERS // 2
    stages = ((0, 1, 2, 3),) if engines.pp == 1 else (tuple(range(half)), tuple(range(half, NUM_LAYERS)))
    made_by = [row % len(engines.replicas) for row in range(len(batch))]
    own = {}
    if rank in engines and engines.coordinates(rank).tp == 0:
        at = engines.coordinates(rank)
        for row in [row for row, replica in enumerate(made_by) if replica == at.replica]:
            its = torch.zeros_like(experts[token_index(batch.lengths, torch.tensor([row]))])
            its[:, list(stages[at.pp])] = of_row(batch, experts, row)[:, list(stages[at.pp])]
            own[row] = its[:-1]
    return Recorded(own, made_by, engines, stages)


def of_row(batch: RolloutBatch, experts: Tensor, row: int) -> Tensor:
    return experts.split(batch.lengths.tolist())[row]


@dataclass(frozen=True)
class World:
    """Of threads. sent: bytes by (source, target)."""

    records: list[RoutingRecords]
    sent: dict[tuple[int, int], int]


def world_of(actor: Layout, sizes: RoutingSizes) -> World:
    sent: dict[tuple[int, int], int] = {}
    whole = SimulatedGroup(range(NUM_RANKS), sent)
    alike = {rank: SimulatedGroup(ranks, sent) for ranks in actor.groups("dp") for rank in ranks}
    alike = {rank: next(group for group in alike.values() if rank in group.ranks) for rank in alike}
    records = [
        RoutingRecords(
            sizes,
            actor,
            rank=rank,
            world=SimulatedExchange(whole, rank),  # type: ignore[arg-type]
            replicas=SimulatedExchange(alike[rank], rank) if rank in actor else None,  # type: ignore[arg-type]
        )
        for rank in range(NUM_RANKS)
    ]
    return World(records, sent)


def check_rows(world: World, actor: Layout, batch: RolloutBatch, experts: Tensor, rows: list[list[int]]) -> None:
    """Each rank of the actor has its replica's rows in its stage's layers."""
    found = on_ranks(NUM_RANKS, lambda rank: world.records[rank].of_rows(batch, rows) if rank in actor else None)
    stages = actor.stages(NUM_LAYERS)
    for rank in actor.ranks:
        at, mine = actor.coordinates(rank), found[rank]
        assert mine is not None and mine.layers == stages[at.pp]
        tokens = token_index(batch.lengths, torch.tensor(rows[at.dp], dtype=torch.int64))
        routed = mine.for_tokens(tokens.flip(0))  # in any order
        assert torch.equal(routed.of_layers(mine.layers), experts[tokens.flip(0)][:, list(mine.layers)])
        assert torch.equal(routed.of_layers(mine.layers[1:]), experts[tokens.flip(0)][:, list(mine.layers[1:])])


@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("dtype", SIZES)
def test_a_rank_has_the_rows_and_layers_that_it_trains_on(actor: str, engines: str, dtype: str) -> None:
    layout, sizes, batch = ACTORS[actor], SIZES[dtype], rollout()
    world, experts = world_of(layout, sizes), experts_of(batch, sizes, seed=1)
    kept = on_ranks(
        NUM_RANKS, lambda rank: world.records[rank].keep(batch, recorded_by(rank, batch, experts, ENGINES[engines]))
    )
    assert all(torch.equal(its.record_ids, torch.arange(9)) for its in kept)
    of_replicas, per_token = replica_rows(batch, layout.dp), NUM_LAYERS * CHOSEN * sizes.dtype.itemsize
    for rank, records in enumerate(world.records):
        share = 0
        if rank in layout:
            rows = torch.tensor(of_replicas[layout.coordinates(rank).dp])
            share = int(batch.lengths[rows].sum()) * per_token // layout.pp
        assert kept_bytes(records) == share, "a rank has its replica's rows in its stage's layers, and nothing else"
    whole = int(batch.lengths.sum()) * per_token
    assert sum(world.sent.values()) <= whole * layout.tp, "each byte goes to one replica, once to each of its copies"
    before = dict(world.sent)
    check_rows(world, layout, kept[0], experts, of_replicas)
    assert world.sent == before, "the rows of the whole batch are where they are computed"


@pytest.mark.parametrize("actor", ACTORS)
def test_rows_of_a_mini_batch_move_between_replicas(actor: str) -> None:
    layout, sizes, batch = ACTORS[actor], SIZES["uint8"], rollout()
    world, experts = world_of(layout, sizes), experts_of(batch, sizes, seed=1)
    kept = on_ranks(
        NUM_RANKS, lambda rank: world.records[rank].keep(batch, recorded_by(rank, batch, experts, ENGINES["four"]))
    )[0]
    world.sent.clear()
    owners = {row: dp for dp, rows in enumerate(replica_rows(batch, layout.dp)) for row in rows}
    chosen = torch.tensor([8, 1, 0, 6])
    some = kept.select(chosen)
    its = torch.cat([of_row(batch, experts, row) for row in chosen.tolist()])
    rows = [[0, 2], [1, 3]] if layout.dp == 2 else [[0, 1, 2, 3]]
    check_rows(world, layout, some, its, rows)
    moved = [
        int(chosen[row]) for dp, own in enumerate(rows) for row in own if owners[int(chosen[row])] != dp
    ]  # by number in the whole batch
    expected = sum(int(batch.lengths[row]) for row in moved) * NUM_LAYERS * CHOSEN * layout.tp
    assert sum(world.sent.values()) == expected, "each stage sends its layers of what another replica computes"


def test_rows_without_a_record_have_zeros_and_others_keep_theirs() -> None:
    layout, sizes, first, second = ACTORS["pp"], SIZES["uint8"], rollout(), rollout(first=2)
    world, experts = world_of(layout, sizes), experts_of(second, sizes, seed=2)
    numbered = on_ranks(NUM_RANKS, lambda rank: world.records[rank].take(second, experts))[0]
    both = joined(first, numbered)
    assert both.has_routing and both.record_ids.tolist() == [-1] * 9 + list(range(9))
    whole = torch.cat([torch.zeros(len(first.input_ids), NUM_LAYERS, CHOSEN, dtype=torch.uint8), experts])
    check_rows(world, layout, both, whole, replica_rows(both, layout.dp))


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("dtype", SIZES)
def test_a_file_has_what_it_gave(actor: str, dtype: str) -> None:
    """Rank 0 alone has the whole, what others read of it goes back to its places, and what is forgotten is gone."""
    layout, sizes, batch = ACTORS[actor], SIZES[dtype], rollout()
    world, experts = world_of(layout, sizes), experts_of(batch, sizes, seed=3)
    kept = on_ranks(NUM_RANKS, lambda rank: world.records[rank].take(batch, experts))[0]
    files = on_ranks(NUM_RANKS, lambda rank: world.records[rank].portable(kept.tensors()))
    assert torch.equal(files[0].pop("routed_experts"), experts)
    assert all(its.keys() == batch.tensors().keys() for its in files), "no number of a record is in a file"
    for records in world.records:
        records.keep_only(kept.record_ids[:4])
    rest = kept.select(torch.arange(4))
    of_rest = experts[: int(batch.lengths[:4].sum())]
    check_rows(world, layout, rest, of_rest, replica_rows(rest, layout.dp))
    sizes_left = [kept_bytes(records) for records in world.records]
    for records in world.records:
        records.keep_only(torch.zeros(0, dtype=torch.int64))
        assert kept_bytes(records) == 0
    assert sum(sizes_left) > 0
    for one, other in pairwise(
        on_ranks(NUM_RANKS, lambda rank: world.records[rank].take(batch, experts).record_ids.tolist())
    ):
        assert one == other == list(range(9, 18)), "numbers are never used again"


def test_tensors_without_records_stay_as_they_are() -> None:
    world, tensors = world_of(ACTORS["tp"], SIZES["uint8"]), rollout().tensors()
    assert world.records[0].portable(tensors) == tensors
