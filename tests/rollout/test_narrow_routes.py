"""The engine's experts keep their type: nothing wider is made of a record before a layer's router has the layer's part.

Every operation of torch between what vLLM returns and a micro-batch's tensor on the device is looked at, with real
messages of one rank; numpy's conversions are errors.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.batch import RolloutBatch, offsets, response_mask
from hybridflow.config.losses import Update
from hybridflow.flows.mini_batches import epochs_of_mini_batches
from hybridflow.models.micro_batch import padding, prediction_micro_batches
from hybridflow.models.routing import RoutingSizes, as_record, is_recorded, replayed, routing_of
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.rollout.partial import PartialGroup, ReplicaWork, UnderWay, pieces_of_groups
from hybridflow.rollout.recorded import RecordedPiece
from hybridflow.rollout.routing import ReturnedRouting, SlotRecorder
from hybridflow.rollout.routing_records import RoutingRecords
from hybridflow.rollout.row import ENDED, RolloutRow
from tests.worlds import world_of_one

NUM_LAYERS, CHOSEN, LENGTHS = 6, 4, (7, 12, 9, 7, 11, 10)
each_type = pytest.mark.parametrize("num_experts", [256, 257])


class Guarded(np.ndarray):
    """As vLLM returns them."""

    def astype(self, *args: Any, **named: Any) -> Any:
        raise AssertionError("a record is converted")


class NothingWider(TorchDispatchMode):
    """Notes tensors of a wider type than a record with more entries than there are tokens."""

    def __init__(self, sizes: RoutingSizes, num_tokens: int) -> None:
        super().__init__()
        self._bytes, self._most, self.wide, self.narrow = sizes.dtype.itemsize, num_tokens, list[str](), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for found in tree_leaves(result):
            if isinstance(found, Tensor) and found.numel() > self._most:
                self.narrow += 1
                if found.dtype.itemsize > self._bytes:
                    self.wide.append(f"{function}: {found.dtype} {tuple(found.shape)}")
        return result


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    """Of a world of one, unless another test file has left one."""
    with world_of_one() as world:
        yield Exchange(world, torch.device("cpu"))


def sizes_of(num_experts: int) -> RoutingSizes:
    sizes = RoutingSizes(NUM_LAYERS, CHOSEN, num_experts)
    assert sizes.dtype == (torch.uint8 if num_experts <= 256 else torch.uint16)
    return sizes


def records_of(sizes: RoutingSizes, exchange: Exchange) -> RoutingRecords:
    """Of one rank."""
    engines, layout = RolloutLayout(1, 1, ((0,),)), Layout(1, 1, 1, (0,))
    of_all = (engines, (tuple(range(NUM_LAYERS)),))
    return RoutingRecords(sizes, layout, rank=0, world=exchange, replicas=exchange, engines=of_all)


def chosen_experts(num_tokens: int, sizes: RoutingSizes) -> np.ndarray:
    """(tokens, layers, k), the last expert among them."""
    order = np.random.default_rng(num_tokens).random((num_tokens, NUM_LAYERS, sizes.num_experts - 1)).argsort(-1)
    found = order[..., :CHOSEN]
    found[:, :, 0] = sizes.num_experts - 1
    return found.astype("uint8" if sizes.num_experts <= 256 else "uint16")


def rollout() -> RolloutBatch:
    """Two prompts of three rows each."""
    lengths, prompts = torch.tensor(LENGTHS), torch.tensor([5] * 3 + [4] * 3)
    ids = torch.arange(int(lengths.sum())) % 5
    for first in (0, 3):
        begins = offsets(lengths)[first : first + 3].tolist()
        for begin in begins:
            ids[begin : begin + int(prompts[first])] = torch.arange(int(prompts[first]))
    mask, indices = response_mask(lengths, prompts), torch.arange(2).repeat_interleave(3)
    return RolloutBatch(ids, lengths, prompts, indices, torch.zeros(6, dtype=torch.bool), mask, torch.zeros(len(ids)))


@each_type
def test_from_vllms_output_to_a_micro_batch_on_the_device(num_experts: int, exchange: Exchange) -> None:
    sizes, batch, layers = sizes_of(num_experts), rollout(), tuple(range(NUM_LAYERS))
    returned = [chosen_experts(length - 1, sizes) for length in LENGTHS]
    expected = [torch.from_numpy(found).long() for found in returned]
    update = Update(mini_batch_size=3, epochs=2)
    watched = NothingWider(sizes, len(batch.input_ids))
    with watched:
        recorder, own = ReturnedRouting(sizes), []
        for row, found in enumerate(returned):
            output: Any = mock.Mock(routed_experts=found.view(Guarded))
            own.append([RecordedPiece(0, LENGTHS[row], recorder.experts(f"{row}", output, LENGTHS[row] - 1))])
        records = records_of(sizes, exchange)
        kept = records.add(batch, own, 1)
        epochs = epochs_of_mini_batches(batch.prompt_indices, 1, update=update, seed=1, varies=False)
        records.send(kept, 1, epochs)
        made = []
        for rows in [rows for mini_batches in epochs for rows in mini_batches]:
            some = kept.select(rows)
            experts = records.of_rows(some, records.rows_of_replicas(some)[0])
            for each in prediction_micro_batches(
                some,
                [0, 1, 2],
                max_tokens=30,
                padded=padding(8),
                device=torch.device("cpu"),
                experts=experts,
            ):
                made.append((some, rows, each, routing_of(each.routed, each.rows, layers, None, each.rows_per_token)))
    assert not watched.wide and watched.narrow > 20
    num_rows = 0
    for some, rows, each, routing in made:
        assert routing.experts.dtype == sizes.dtype
        # each wanted output is predicted from the token before it
        of_row = torch.searchsorted(some.lengths.cumsum(0), each.where, right=True)
        before = each.where - offsets(some.lengths)[of_row] - 1
        for place, row, position in zip(each.rows.tolist(), rows[of_row].tolist(), before.tolist(), strict=True):
            assert torch.equal(routing.experts[place].long(), expected[row][position])
        padded = each.rows_per_token() == 0
        assert not routing.experts[padded].long().any() and int(each.rows_per_token().sum()) == int(
            (some.lengths - 1).sum()
        )
        own_choice = torch.zeros(len(each.input_ids), CHOSEN, dtype=torch.int64)
        taken = replayed(own_choice, routing.experts[:, 2])
        assert torch.equal(taken, torch.where(padded[:, None], own_choice, routing.experts[:, 2].long()))
        assert is_recorded(routing.experts[~padded].view(-1, CHOSEN)).all()
        num_rows += len(some)
    assert num_rows == 12 and len(made) == 4


@each_type
def test_segments_of_partial_rollouts(num_experts: int, exchange: Exchange) -> None:
    """A row that goes on: the experts of tokens that have some already do not travel again."""
    sizes = sizes_of(num_experts)
    second = chosen_experts(9, sizes)
    parts = [[4] * 4, [5] * 3], torch.from_numpy(second).split([6, 3])  # a prompt of three tokens, and two segments
    under_way = UnderWay([PartialGroup(0, 0, 1, [1, 2, 3], [RolloutRow()])])
    records = records_of(sizes, exchange)
    lengths, prompts = torch.tensor([10]), torch.tensor([3])
    mask, one = response_mask(lengths, prompts), torch.zeros(1, dtype=torch.int64)
    batch = RolloutBatch(torch.arange(10), lengths, prompts, one, one.bool(), mask, torch.zeros(10))
    watched = NothingWider(sizes, 10)
    with watched:
        for token_ids, found in zip(*parts, strict=True):
            added, own = (
                {(0, 0): RolloutRow(token_ids, [-1.0] * len(token_ids), state=ENDED, calls=1, experts=experts)}
                for experts in (None, found)
            )
            under_way.record(added, own, [ReplicaWork((0,), 1, frozenset())])
            under_way.add(added, 0)
        kept = records.add(batch, pieces_of_groups(under_way.groups), 1)
        of_file = records.of_file(under_way.pieces())
        whole = records.of_rows(kept, [0]).for_tokens(torch.arange(10)).experts
    assert not watched.wide and watched.narrow > 5
    assert whole.dtype == sizes.dtype and whole[:-1].tolist() == second.tolist() and not whole[-1].long().any()
    assert of_file is not None and of_file.dtype == sizes.dtype and of_file.tolist() == second.tolist()


@each_type
def test_the_slots_of_the_cache(num_experts: int) -> None:
    """Of the older runner: steps write by slot, a request reads its blocks."""
    sizes, recorder = sizes_of(num_experts), object.__new__(SlotRecorder)
    recorder.sizes, recorder._layers, recorder._layer = sizes, [1, 4], "layer"
    recorder._group, recorder._block_tokens = 0, 4
    recorder._records = torch.zeros(21, 2, CHOSEN, dtype=sizes.dtype)
    recorder._runner = mock.Mock(requests={"a": mock.Mock(block_ids=[[3, 1]])})
    experts = torch.from_numpy(chosen_experts(6, sizes)).long()
    slots = {"layer": torch.tensor([12, 13, 14, 15, 4, 5, -1])}
    with mock.patch("vllm.forward_context.get_forward_context", return_value=mock.Mock(slot_mapping=slots)):
        for column, layer in enumerate(recorder._layers):
            recorder._record(column, torch.cat([experts[:, layer], experts[:1, layer]]))
    found = recorder.experts("a", None, 6)
    assert found.dtype == sizes.dtype and torch.equal(found[:, [1, 4]].long(), experts[:, [1, 4]])
    assert not found[:, [0, 2, 3, 5]].long().any()


def test_a_file_of_former_versions_has_the_same_experts(tmp_path: Any) -> None:
    """Which wrote int16 where there are more than 256 experts."""
    sizes = sizes_of(300)
    found = torch.from_numpy(chosen_experts(9, sizes))
    save_file({"old": found.short(), "new": found}, tmp_path / "file")
    read = load_file(tmp_path / "file")
    assert read["old"].dtype == torch.int16 and read["new"].dtype == torch.uint16
    assert torch.equal(as_record(read["old"]), found) and torch.equal(as_record(read["new"]), found)
    group = PartialGroup(0, 0, 1, [1, 2, 3], [RolloutRow([4] * 7, [0.0] * 7, versions=[0] * 7, calls=1)])
    tensors = UnderWay([group]).tensors()
    for dtype in (torch.int16, torch.uint16):
        again = UnderWay.of_tensors({**tensors, "routed_experts": found.view(dtype)})
        [[piece]] = again.pieces()
        assert (piece.made_by, piece.num_tokens) == (0, 9) and torch.equal(piece.experts, found)


def test_the_recorders_of_all_replicas_take_turns_with_the_rows_of_a_file() -> None:
    """A row that has no token yet has no experts."""
    sizes, lengths = sizes_of(300), (7, 0, 4, 5)
    experts = torch.from_numpy(chosen_experts(sum(length + 2 for length in lengths if length), sizes))
    rows = [RolloutRow([4] * n, [0.0] * n, versions=[0] * n, calls=1) for n in lengths]
    tensors = UnderWay([PartialGroup(0, 0, 1, [1, 2, 3], rows)]).tensors() | {"routed_experts": experts}
    parts = iter(experts.split([9, 6, 7]))
    expected = [next(parts) if length else None for length in lengths]
    for recorder in (0, 1, None):
        pieces = UnderWay.of_tensors(tensors, num_replicas=2, recorder=recorder).pieces()
        assert [[(piece.made_by, piece.num_tokens) for piece in its] for its in pieces] == [
            [(0, 9)],
            [],
            [(1, 6)],
            [(0, 7)],
        ]
        for its, whole in zip(pieces, expected, strict=True):
            for piece in its:
                assert (piece.experts is not None) == (piece.made_by == recorder)
                assert piece.experts is None or torch.equal(piece.experts, whole)
