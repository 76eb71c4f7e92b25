"""The engine's experts on their way: which rank has those of which row and layer, and how many bytes went where."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, joined, response_mask, token_index
from hybridflow.config.losses import Update
from hybridflow.flows.mini_batches import epochs_of_mini_batches
from hybridflow.models.prompt_groups import replica_rows, rows_that_stay
from hybridflow.models.routing import RoutingSizes
from hybridflow.parallel.layout import Layout, RolloutLayout, Stages
from hybridflow.rollout.recorded import RecordedPiece
from hybridflow.rollout.routing_records import EXPERTS, MiniBatches, RoutingRecords
from tests.rollout.simulated_exchange import SimulatedExchange, SimulatedGroup, on_ranks

NUM_RANKS, NUM_LAYERS, CHOSEN = 4, 4, 2
SIZES = {"uint8": RoutingSizes(NUM_LAYERS, CHOSEN, 16), "uint16": RoutingSizes(NUM_LAYERS, CHOSEN, 512)}
ACTORS = {
    "tp": Layout(2, 1, 2, (0, 1, 2, 3)),
    "pp": Layout(1, 2, 2, (0, 1, 2, 3)),
    "vpp": Layout(2, 2, 1, (0, 1, 2, 3), vpp=2),
    "two of four ranks": Layout(1, 1, 2, (2, 3)),
    "cp": Layout(1, 1, 2, (0, 1, 2, 3), cp=2),
    "cp in stages": Layout(1, 2, 1, (0, 1, 2, 3), cp=2),
}
ENGINES = {
    "four": RolloutLayout(1, 1, ((0,), (1,), (2,), (3,))),
    "two": RolloutLayout(2, 1, ((0, 1), (2, 3))),
    "stages": RolloutLayout(1, 2, ((0, 1), (2, 3))),
    "beside": RolloutLayout(1, 1, ((0,), (1,))),
}


def kept_bytes(records: RoutingRecords) -> int:
    return sum(record.experts.nbytes for record in records._records.values() if record.experts is not None)


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
    experts = every.topk(CHOSEN).indices
    experts[batch.lengths.cumsum(0) - 1] = 0
    return experts.to(sizes.dtype)


def recorded_by(
    rank: int, batch: RolloutBatch, experts: Tensor, engines: RolloutLayout, most_pieces: int = 1
) -> list[list[RecordedPiece]]:
    """As the engine's ranks tell: pieces in turn to the replicas, each stage its layers, other ranks nothing.

    A row's last token has no record, but counts to the row's last piece.
    """
    stages, rows = stages_of(engines), []
    for row in range(len(batch)):
        parts, pieces = of_row(batch, experts, row).tensor_split(1 + row % most_pieces), list[RecordedPiece]()
        for number, part in enumerate(parts):
            made_by, its = (row + number) % len(engines.replicas), None
            if rank in engines and engines.coordinates(rank)[::2] == (made_by, 0):
                its = part[: len(part) - (number == len(parts) - 1)].clone()
                for layer in set(range(NUM_LAYERS)) - set(stages[engines.coordinates(rank).pp]):
                    its[:, layer] = 0
            pieces.append(RecordedPiece(made_by, len(part), its))
        rows.append(pieces)
    return rows


def stages_of(engines: RolloutLayout) -> Stages:
    return ((0, 1, 2, 3),) if engines.pp == 1 else ((0, 1), (2, 3))


def of_row(batch: RolloutBatch, experts: Tensor, row: int) -> Tensor:
    return experts.split(batch.lengths.tolist())[row]


@dataclass(frozen=True)
class World:
    """Of threads. sent: bytes by (source, target)."""

    records: list[RoutingRecords]
    sent: dict[tuple[int, int], int]


def world_of(
    actor: Layout,
    sizes: RoutingSizes,
    mini_batches: MiniBatches | None = None,
    *,
    of_rollouts: bool = True,
    engines: str = "four",
) -> World:
    sent: dict[tuple[int, int], int] = {}
    whole = SimulatedGroup(range(NUM_RANKS), sent)
    alike = {rank: SimulatedGroup(ranks, sent) for ranks in actor.groups("cp", "dp") for rank in ranks}
    alike = {rank: next(group for group in alike.values() if rank in group.ranks) for rank in alike}
    records = [
        RoutingRecords(
            sizes,
            actor,
            rank=rank,
            world=SimulatedExchange(whole, rank),  # type: ignore[arg-type]
            replicas=SimulatedExchange(alike[rank], rank) if rank in actor else None,  # type: ignore[arg-type]
            engines=(ENGINES[engines], stages_of(ENGINES[engines])),
            mini_batches=mini_batches,
            of_rollouts=of_rollouts,
        )
        for rank in range(NUM_RANKS)
    ]
    return World(records, sent)


def check_rows(world: World, actor: Layout, batch: RolloutBatch, experts: Tensor) -> list[list[int]]:
    """Each rank of the actor has its replica's rows in its stage's layers; which rows, by replica."""
    [rows] = {tuple(map(tuple, records.rows_of_replicas(batch))) for records in world.records}
    assert sorted(row for part in rows for row in part) == list(range(len(batch)))
    stages, sent = actor.stages(NUM_LAYERS), dict(world.sent)
    for rank in actor.ranks:
        at = actor.coordinates(rank)
        mine = world.records[rank].of_rows(batch, rows[at.dp])
        assert mine.layers == stages[at.pp]
        tokens = token_index(batch.lengths, torch.tensor(rows[at.dp], dtype=torch.int64))
        for some in (tokens, tokens.flip(0), tokens[3:-2], tokens[::2].contiguous(), tokens[:0]):  # in any order
            routed = mine.for_tokens(some)
            assert routed.experts.dtype == experts.dtype
            assert torch.equal(routed.of_layers(mine.layers), experts[some][:, list(mine.layers)])
            assert torch.equal(routed.of_layers(mine.layers[1:]), experts[some][:, list(mine.layers[1:])])
    assert world.sent == sent, "what a replica computes is there"
    return [list(part) for part in rows]


@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize(("dtype", "most_pieces"), [("uint8", 1), ("uint16", 1), ("uint8", 3), ("uint16", 3)])
def test_a_rank_has_the_rows_and_layers_that_it_trains_on(
    actor: str, engines: str, dtype: str, most_pieces: int
) -> None:
    """Also of rows whose segments several replicas have generated."""
    layout, sizes, batch = ACTORS[actor], SIZES[dtype], rollout()
    world, experts = world_of(layout, sizes, engines=engines), experts_of(batch, sizes, seed=1)
    kept = on_ranks(
        NUM_RANKS,
        lambda rank: world.records[rank].add(
            batch, recorded_by(rank, batch, experts, ENGINES[engines], most_pieces=most_pieces), 1
        ),
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
    assert sum(world.sent.values()) <= whole * layout.tp * layout.cp, (
        "each byte goes to one replica, once to each of its copies"
    )
    assert check_rows(world, layout, kept[0], experts) == of_replicas


def test_a_piece_that_the_engine_has_lost_is_without_experts() -> None:
    """As where a request waits for blocks of the cache when the engine stops."""
    layout, sizes, batch = ACTORS["tp"], SIZES["uint8"], rollout()
    world, experts = world_of(layout, sizes, engines="two"), experts_of(batch, sizes, seed=1)

    def recorded(rank: int) -> list[list[RecordedPiece]]:
        whole = recorded_by(rank, batch, experts, ENGINES["two"], most_pieces=3)
        lost = [[pieces[0], replace(pieces[1], experts=None), *pieces[2:]] for pieces in whole if len(pieces) > 1]
        rows = iter(lost)
        return [next(rows) if len(pieces) > 1 else pieces for pieces in whole]

    for row in range(len(batch)):
        part = of_row(batch, experts, row).tensor_split(1 + row % 3)
        if len(part) > 1:
            part[1].zero_()
    found = on_ranks(NUM_RANKS, lambda rank: world.records[rank].of_file(recorded(rank)))
    assert found[0] is not None and torch.equal(found[0], experts)
    kept = on_ranks(NUM_RANKS, lambda rank: world.records[rank].add(batch, recorded(rank), 1))
    check_rows(world, layout, kept[0], experts)


@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("dtype", SIZES)
def test_a_file_has_the_pieces_of_rows_under_way(engines: str, dtype: str) -> None:
    """Rank 0 alone has them, whoever recorded them."""
    sizes, batch = SIZES[dtype], rollout()
    world, experts = world_of(ACTORS["tp"], sizes, engines=engines), experts_of(batch, sizes, seed=1)
    found = on_ranks(
        NUM_RANKS,
        lambda rank: world.records[rank].of_file(recorded_by(rank, batch, experts, ENGINES[engines], most_pieces=3)),
    )
    assert found[0] is not None and torch.equal(found[0], experts) and found[1:] == [None] * 3
    assert all(target == 0 for _, target in world.sent)
    assert sum(world.sent.values()) <= experts.nbytes


def halves(prompt_indices: Tensor, iteration: int, epochs: int = 2) -> list[list[Tensor]]:
    """Two mini-batches an epoch, as a seed deals them."""
    update = Update(mini_batch_size=-(-len(prompt_indices) // 2), epochs=epochs)
    found = epochs_of_mini_batches(prompt_indices, iteration, update=update, seed=3, varies=False)
    return [list(mini_batches) for mini_batches in found]


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("dtype", SIZES)
def test_two_epochs_of_two_mini_batches_move_nothing(actor: str, dtype: str) -> None:
    """Each byte goes from the engine to the row's owner, once, and in all mini-batches the owner computes the row."""
    layout, sizes, batch = ACTORS[actor], SIZES[dtype], rollout()
    world, experts = world_of(layout, sizes, halves), experts_of(batch, sizes, seed=1)
    kept = on_ranks(
        NUM_RANKS,
        lambda rank: world.records[rank].add(batch, recorded_by(rank, batch, experts, ENGINES["four"]), 5),
    )[0]
    assert (
        sum(world.sent.values())
        <= int(batch.lengths.sum()) * NUM_LAYERS * CHOSEN * sizes.dtype.itemsize * layout.tp * layout.cp
    )
    sent, epochs = dict(world.sent), halves(batch.prompt_indices, 5)
    assert layout.dp == 1 or rows_that_stay(batch, layout.dp, epochs) != replica_rows(batch, layout.dp)
    on_ranks(NUM_RANKS, lambda rank: world.records[rank].send(kept, 5, epochs))
    for rows in [rows for mini_batches in epochs for rows in mini_batches]:
        some, own = kept.select(rows), torch.cat([of_row(batch, experts, row) for row in rows.tolist()])
        check_rows(world, layout, some, own)
    assert world.sent == sent


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("engines", ENGINES)
def test_records_of_several_rollouts_wait_until_the_batch_is_chosen(actor: str, engines: str) -> None:
    """Those of chosen rows go to their owners, once; others stay for the next batch, or are forgotten unsent."""
    layout, sizes, batch = ACTORS[actor], SIZES["uint8"], rollout()
    world, more = world_of(layout, sizes, halves, of_rollouts=False, engines=engines), rollout(first=2)
    experts = [experts_of(each, sizes, seed=seed) for seed, each in enumerate((batch, more))]
    kept = [
        on_ranks(
            NUM_RANKS,
            lambda rank, each=each, its=its: world.records[rank].add(
                each, recorded_by(rank, each, its, ENGINES[engines]), 1
            ),
        )[0]
        for each, its in zip((batch, more), experts, strict=True)
    ]
    assert not world.sent and not any(kept_bytes(records) for records in world.records)
    rows, per_token = [torch.tensor([0, 1, 2, 6, 7, 8]), torch.tensor([3, 4, 5])], NUM_LAYERS * CHOSEN
    chosen = joined(*(each.select(some) for each, some in zip(kept, rows, strict=True)))
    chosen = replace(chosen, prompt_indices=torch.arange(3).repeat_interleave(3))
    own = torch.cat(
        [of_row(each, its, row) for each, its, some in zip(kept, experts, rows, strict=True) for row in some.tolist()]
    )
    rest = more.select(torch.tensor([0, 1, 2])), kept[1].select(torch.tensor([0, 1, 2]))
    whole = int(chosen.lengths.sum()) * per_token * layout.tp * layout.cp

    on_ranks(NUM_RANKS, lambda rank: world.records[rank].send(chosen, 1))
    sent = dict(world.sent)
    assert sum(sent.values()) <= whole == sum(kept_bytes(records) for records in world.records)
    assert check_rows(world, layout, chosen, own) == rows_that_stay(chosen, layout.dp, halves(chosen.prompt_indices, 1))
    for step in ("chosen", "mini-batches"):
        on_ranks(
            NUM_RANKS,
            lambda rank, step=step: (
                world.records[rank].send(chosen, 1)
                if step == "chosen"
                else world.records[rank].send(chosen, 1, halves(chosen.prompt_indices, 1))
            ),
        )
    assert world.sent == sent, "they are there by now"

    files = on_ranks(NUM_RANKS, lambda rank: world.records[rank].portable(rest[1].tensors()))
    expected = torch.cat([of_row(more, experts[1], row) for row in range(3)])
    assert torch.equal(files[0][EXPERTS], expected) and not any(EXPERTS in its for its in files[1:])
    for records in world.records:
        records.keep_only(rest[1].record_ids)
        assert not kept_bytes(records) and [len(record.pieces) for record in records._records.values()] == [1] * 3
    world.sent.clear()
    on_ranks(NUM_RANKS, lambda rank: world.records[rank].send(rest[1], 2))
    assert sum(world.sent.values()) <= int(rest[0].lengths.sum()) * per_token * layout.tp * layout.cp
    check_rows(world, layout, rest[1], expected)


@pytest.mark.parametrize("actor", ACTORS)
def test_a_batch_of_a_file_and_a_rollout_settles(actor: str) -> None:
    """As of a run that goes on with groups from before."""
    layout, sizes, batch, more = ACTORS[actor], SIZES["uint8"], rollout(), rollout(first=1)
    world = world_of(layout, sizes, halves, of_rollouts=False)
    experts = [experts_of(each, sizes, seed=seed) for seed, each in enumerate((batch, more))]
    taken, *_ = [records.take(batch, experts[0]) for records in world.records]
    made = on_ranks(
        NUM_RANKS, lambda rank: world.records[rank].add(more, recorded_by(rank, more, experts[1], ENGINES["four"]), 4)
    )[0]
    whole = replace(joined(taken, made), prompt_indices=torch.arange(6).repeat_interleave(3))
    on_ranks(NUM_RANKS, lambda rank: world.records[rank].send(whole, 4))
    found = check_rows(world, layout, whole, torch.cat(experts))
    assert found == rows_that_stay(whole, layout.dp, halves(whole.prompt_indices, 4))


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("dtype", SIZES)
def test_records_move_once_where_mini_batches_are_others(actor: str, dtype: str) -> None:
    """Of a part of the rows: each stage sends its layers of those that get another owner."""
    layout, sizes, batch = ACTORS[actor], SIZES[dtype], rollout()
    world, experts = world_of(layout, sizes), experts_of(batch, sizes, seed=1)
    kept = on_ranks(
        NUM_RANKS, lambda rank: world.records[rank].add(batch, recorded_by(rank, batch, experts, ENGINES["four"]), 1)
    )[0]
    world.sent.clear()
    chosen = torch.tensor([8, 1, 0, 6, 7])
    some, own = kept.select(chosen), torch.cat([of_row(batch, experts, row) for row in chosen.tolist()])
    before, epochs = check_rows(world, layout, some, own), halves(some.prompt_indices, 1)
    on_ranks(NUM_RANKS, lambda rank: world.records[rank].send(some, 1, epochs))
    sent = dict(world.sent)
    after = check_rows(world, layout, some, own)
    assert after == rows_that_stay(some, layout.dp, epochs)
    moved = [row for old, new in zip(before, after, strict=True) for row in new if row not in old]
    expected = int(some.lengths[moved].sum()) * NUM_LAYERS * CHOSEN * sizes.dtype.itemsize * layout.tp * layout.cp
    assert sum(sent.values()) == expected and bool(moved) == (layout.dp > 1)
    on_ranks(NUM_RANKS, lambda rank: world.records[rank].send(some, 1, epochs))
    assert world.sent == sent, "they are there by now"
    total = sum(kept_bytes(records) for records in world.records)
    assert total == int(batch.lengths.sum()) * NUM_LAYERS * CHOSEN * sizes.dtype.itemsize * layout.tp * layout.cp


def test_rows_without_a_record_have_zeros_and_others_keep_theirs() -> None:
    layout, sizes, first, second = ACTORS["pp"], SIZES["uint8"], rollout(), rollout(first=2)
    world, experts = world_of(layout, sizes), experts_of(second, sizes, seed=2)
    numbered = on_ranks(NUM_RANKS, lambda rank: world.records[rank].take(second, experts))[0]
    both = joined(first, numbered)
    assert both.record_ids.tolist() == [-1] * 9 + list(range(9))
    whole = torch.cat([torch.zeros(len(first.input_ids), NUM_LAYERS, CHOSEN, dtype=torch.uint8), experts])
    rows = check_rows(world, layout, both, whole)
    assert [[row for row in part if row >= 9] for part in rows] == [
        [row + 9 for row in part] for part in replica_rows(second, layout.dp)
    ]


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
    check_rows(world, layout, rest, of_rest)
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


def test_a_row_that_a_batch_has_twice_has_its_experts_twice() -> None:
    """And branches of a row, which are read apart, have their parts of the row's record."""
    sizes, batch = SIZES["uint8"], rollout()
    experts = experts_of(batch, sizes, 1)
    world: Any = SimulatedExchange(SimulatedGroup([0], {}), 0)
    records = RoutingRecords(sizes, Layout(1, 1, 1, (0,)), rank=0, world=world, replicas=None)
    batch = records.take(batch, experts)
    twice = records.of_rows(batch.select(torch.tensor([1, 1, 4])), [0, 1, 2])
    of_row = experts.split(batch.lengths.tolist())
    for row, expected in enumerate((of_row[1], of_row[1], of_row[4])):
        assert torch.equal(twice.experts[row], expected)
    starts = torch.zeros(len(batch.input_ids), dtype=torch.bool)
    starts[batch.lengths[0] + 4] = True  # row 1 has two sequences, of 4 and 5 tokens
    apart = records.of_rows(replace(batch, branch_starts=starts).by_branch(), [1, 2, 3])
    for row, expected in ((1, of_row[1][:4]), (2, of_row[1][4:]), (3, of_row[2])):
        assert torch.equal(apart.experts[row], expected)
