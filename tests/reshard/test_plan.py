"""Plans carried out on tensors by plain indexing, and their counts by hand.

Every element of a model is a number of its own. The training shards and the engine's shards are cut here from the
HuggingFace parts, as megatron and vLLM cut them, by nothing of what the plan uses.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import model_weights, num_parameters
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Layout, RolloutLayout, TrainingCoordinates
from hybridflow.reshard.groups import engine_stages, rollout_layout, standalone_layout
from hybridflow.reshard.plan import BucketTraffic, Operation, ReshardPlan, Way, inverse, plan_reshard
from hybridflow.reshard.slices import Piece, View


def tiny_spec(**changes: object) -> ModelSpec:
    """4 layers of 4 query heads, head_dim 2; the vocabulary is padded to 64."""
    fields = dict(
        path=Path("nowhere"),
        family="qwen2",
        head="lm",
        num_layers=4,
        hidden_size=3,
        ffn_hidden_size=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=2,
        vocab_size=50,
        norm_eps=1e-6,
        tied=False,
        max_positions=64,
    )
    return ModelSpec(**{**fields, **changes})


def layout(tp: int, pp: int, dp: int, first: int = 0, **more: int) -> Layout:
    return Layout(tp, pp, dp, tuple(range(first, first + tp * pp * dp)), **more)


# ---------------------------------------------------------------------------------------------- a small world


def hf_parts(weight: Weight, spec: ModelSpec, first: int) -> list[Tensor]:
    """The parts as matrices of numbers from `first` on; the rows that pad a vocabulary count as its own."""
    shapes = [shape if len(shape) == 2 else (*shape, 1) for shape in weight.shapes(spec)]
    if weight.split is Split.VOCAB:
        shapes = [(64, shapes[0][1])]
    numbers = torch.arange(first, first + sum(prod(shape) for shape in shapes))
    return [x.view(shape) for x, shape in zip(numbers.split([prod(s) for s in shapes]), shapes, strict=True)]


def megatron_shard(weight: Weight, parts: list[Tensor], spec: ModelSpec, tp: int, rank: int) -> Tensor:
    if weight.split is Split.REPLICATED:
        return parts[0]
    if weight.split is Split.COLUMNS:
        return torch.cat([part.tensor_split(tp, dim=1)[rank] for part in parts])
    if weight.split is Split.GATED:
        halves = parts if len(parts) > 1 else parts[0].chunk(2)  # GLM-4 has gate and up in one
        return torch.cat([half.tensor_split(tp)[rank] for half in halves])
    if weight.split is Split.QKV:
        groups = zip(*(part.tensor_split(spec.num_kv_heads) for part in parts), strict=True)
        return torch.cat([torch.cat(group) for group in groups]).tensor_split(tp)[rank]
    return parts[0].tensor_split(tp)[rank]


def expert_shard(weight: Weight, parts: list[Tensor], spec: ModelSpec, cut: tuple[int, int], number: int) -> Tensor:
    """Of the rank of this number among those that share the experts of a stage; cut: (etp, ep), etp fastest."""
    etp, ep = cut
    held = spec.num_experts // ep
    first, of_each = number // etp % ep * held, len(parts) // spec.num_experts
    own = parts[first * of_each : (first + held) * of_each]
    return megatron_shard(weight, own, spec, etp, number % etp)


def vllm_shard(weight: Weight, parts: list[Tensor], spec: ModelSpec, tp: int, rank: int) -> Tensor:
    if spec.family == "glm" and "linear_fc1" in weight.megatron:
        return parts[0].tensor_split(tp)[rank]
    if weight.split is not Split.QKV:
        return megatron_shard(weight, parts, spec, tp, rank)
    q, k, v = parts
    kv_ranks = min(tp, spec.num_kv_heads)  # vLLM repeats a head on tp / kv_ranks ranks
    kv_rank = rank // (tp // kv_ranks)
    return torch.cat([q.tensor_split(tp)[rank], k.tensor_split(kv_ranks)[kv_rank], v.tensor_split(kv_ranks)[kv_rank]])


@dataclass(frozen=True)
class World:
    spec: ModelSpec
    train: Layout
    rollout: RolloutLayout
    bucket_elements: int = 100

    @cached_property
    def plan(self) -> ReshardPlan:
        return plan_reshard(self.spec, self.train, self.rollout, bucket_elements=self.bucket_elements)

    @cached_property
    def ranks(self) -> list[int]:
        return sorted({*self.train.ranks, *self.rollout.ranks})

    @cached_property
    def weights(self) -> list[Weight]:
        return list(model_weights(self.spec, "lm"))

    @cached_property
    def parts(self) -> dict[str, list[Tensor]]:
        found, first = {}, 0
        for weight in self.weights:
            found[weight.megatron] = hf_parts(weight, self.spec, first)
            first += sum(part.numel() for part in found[weight.megatron])
        return found

    def on_stage(self, weight: Weight, stage: int, stages: tuple[tuple[int, ...], ...]) -> bool:
        name, last = weight.megatron, len(stages) - 1
        if "layers." in name:
            return int(name.split(".")[2]) in stages[stage]
        if "embedding" in name:
            return stage == 0 or (self.spec.tied and stage == last and name == "embedding.word_embeddings.weight")
        return stage == last

    @cached_property
    def training(self) -> dict[int, dict[str, Tensor]]:
        """rank -> megatron name -> its shard as a matrix."""
        stages, found = self.train.stages(self.spec.num_layers), {}
        for rank in self.train.ranks:
            at = self.train.coordinates(rank)
            found[rank] = {w.megatron: self.trained(w, at) for w in self.weights if self.on_stage(w, at.pp, stages)}
        return found

    def trained(self, weight: Weight, at: TrainingCoordinates) -> Tensor:
        parts, train = self.parts[weight.megatron], self.train
        if ".experts." not in weight.megatron:
            return megatron_shard(weight, parts, self.spec, train.tp, at.tp)
        etp = train.etp or train.tp // train.ep
        return expert_shard(weight, parts, self.spec, (etp, train.ep), at.dp * train.tp + at.tp)

    @cached_property
    def engine(self) -> dict[int, dict[str, Tensor]]:
        """rank -> megatron name -> the engine's shard as a matrix."""
        stages, found = engine_stages(self.spec.num_layers, self.train, self.rollout), {}
        for rank in self.rollout.ranks:
            at = self.rollout.coordinates(rank)
            found[rank] = {
                w.megatron: self.generating(w, at.tp) for w in self.weights if self.on_stage(w, at.pp, stages)
            }
        return found

    def generating(self, weight: Weight, tp_rank: int) -> Tensor:
        parts, tp = self.parts[weight.megatron], self.rollout.tp
        if ".experts." in weight.megatron and self.rollout.expert_parallel:
            return expert_shard(weight, parts, self.spec, (1, tp), tp_rank)
        return vllm_shard(weight, parts, self.spec, tp, tp_rank)


def source_of(piece: Piece, shard: Tensor) -> Tensor:
    rows = shard[piece.source_row : piece.source_row + piece.rows]
    found = rows[:, piece.source_column : piece.source_column + piece.columns]
    assert found.shape == (piece.rows, piece.columns), "a piece reaches beyond the training shard"
    return found


class Landing:
    """The engine's shards of a rank while pieces land: -1 where nothing has yet."""

    def __init__(self, world: World, rank: int) -> None:
        self.expected = world.engine.get(rank, {})
        self.shards = {name: torch.full_like(shard, -1) for name, shard in self.expected.items()}

    def land(self, weight: Weight, piece: Piece, values: Tensor) -> None:
        rows = self.shards[weight.megatron][piece.row : piece.row + piece.rows]
        target = rows[:, piece.column : piece.column + piece.columns]
        assert target.shape == values.shape and (target == -1).all(), "a piece lands outside, or where one has landed"
        target.copy_(values)

    def check(self) -> None:
        for name, shard in self.shards.items():
            assert torch.equal(shard, self.expected[name]), name


# ------------------------------------------------------------------------------------------------- carried out


def check_operations(world: World) -> None:
    """(a) the pieces of every rank's operations make up its engine's shards."""
    for rank in world.ranks:
        landing = Landing(world, rank)
        operations = world.plan.operations(rank)
        assert [operation.weight.megatron for operation in operations] == list(landing.shards)
        assert {w.megatron for w in world.plan.trained_weights(rank)} == set(world.training.get(rank, {}))
        for operation in operations:
            dimensions = len(operation.weight.shapes(world.spec)[0])
            assert operation.shape == landing.shards[operation.weight.megatron].shape[:dimensions]
            for source, piece in operation.pieces:
                shard = world.training[source][operation.weight.megatron]
                landing.land(operation.weight, piece, source_of(piece, shard))
        landing.check()


def check_traffic(world: World) -> None:
    """(b) message by message, with the pieces that a rank has itself."""
    plan = world.plan
    traffic = {rank: plan.traffic(rank) for rank in world.ranks}
    for rank in world.ranks:
        landing = Landing(world, rank)
        for operation in plan.operations(rank):
            for source, piece in operation.pieces:
                if source == rank:
                    landing.land(
                        operation.weight, piece, source_of(piece, world.training[rank][operation.weight.megatron])
                    )
        for number, (exchanged, bucket) in enumerate(zip(traffic[rank], plan.buckets, strict=True)):
            assert [m.peer for m in exchanged.receives] == sorted({m.peer for m in exchanged.receives} - {rank})
            assert [m.peer for m in exchanged.sends] == sorted({m.peer for m in exchanged.sends} - {rank})
            for message in exchanged.receives:
                sent = dict(traffic[message.peer][number].sends)
                assert sent[rank] == message.pieces and message.pieces
                for weight, piece in message.pieces:
                    assert weight in bucket
                    landing.land(weight, piece, source_of(piece, world.training[message.peer][weight.megatron]))
            for message in exchanged.sends:
                assert rank in {m.peer for m in traffic[message.peer][number].receives}
        landing.check()
    check_counts(world, traffic)


def numbers(shards: dict[str, Tensor]) -> set[int]:
    return {number for shard in shards.values() for number in shard.flatten().tolist()}


def check_counts(world: World, traffic: dict[int, tuple[BucketTraffic, ...]]) -> None:
    """What is received is what lacks, and all counts are those of the tensors."""
    plan = world.plan
    for rank in world.ranks:
        held, engine = world.training.get(rank, {}), world.engine.get(rank, {})
        received = sum(m.num_elements for bucket in traffic[rank] for m in bucket.receives)
        sent = sum(m.num_elements for bucket in traffic[rank] for m in bucket.sends)
        lacking = len(numbers(engine) - numbers(held))
        assert plan.received_elements(rank) == plan.lower_bound(rank) == received == lacking
        assert plan.sent_elements(rank) == sent
        assert {weight.megatron for weight in plan.trained_weights(rank)} == held.keys()
        assert sum(prod(op.shape) for op in plan.operations(rank)) == sum(x.numel() for x in engine.values())
        moved = [op.weight.megatron for op in plan.operations(rank) if op.way is Way.PERMUTE]
        assert plan.permuted_elements(rank) == sum(held[name].numel() for name in moved)
    assert sum(map(plan.sent_elements, world.ranks)) == sum(map(plan.received_elements, world.ranks))


def check_ways(world: World) -> None:
    """(c) alias and permute by order and view; nothing is gathered that need not be."""
    for rank in world.ranks:
        for operation in world.plan.operations(rank):
            name = operation.weight.megatron
            held, expected = world.training.get(rank, {}).get(name), world.engine[rank][name]
            mine, wanted = (set(x.flatten().tolist()) if x is not None else set() for x in (held, expected))
            assert (operation.way is Way.GATHER) == (not wanted <= mine)
            assert (operation.view is None) == (operation.way is Way.GATHER)
            assert operation.contains_training_shard == (held is not None and mine <= wanted)
            assert (operation.order == ()) == (operation.way is not Way.PERMUTE)
            assert operation.order != tuple(range(len(operation.order))) or not operation.order
            if operation.way is Way.GATHER:
                continue
            if operation.way is Way.PERMUTE:
                blocks = held.tensor_split(len(operation.order))
                held = torch.cat([blocks[i] for i in operation.order])
                assert operation.view.row == 0
            view = operation.view
            seen = held[view.row : view.row + view.rows, view.column : view.column + view.columns]
            assert torch.equal(seen, expected), name


def check_buckets(world: World) -> None:
    plan = world.plan
    assert sorted(w.megatron for bucket in plan.buckets for w in bucket) == sorted(w.megatron for w in world.weights)
    for bucket in plan.buckets:
        names = {weight.megatron for weight in bucket}
        largest = max(sum(x.numel() for name, x in e.items() if name in names) for e in world.engine.values())
        assert largest <= world.bucket_elements or len(bucket) == 1


TRAINING = [
    *[layout(1, 1, 1), layout(2, 1, 1), layout(1, 2, 1), layout(2, 2, 1), layout(2, 1, 2), layout(1, 2, 2)],
    *[layout(2, 2, 2), layout(4, 1, 2), layout(1, 4, 1), layout(1, 1, 4), layout(4, 2, 1)],
    layout(1, 2, 1, vpp=2),
    layout(2, 2, 1, vpp=2),
    layout(1, 2, 2, first_stage_layers=1),
    layout(1, 3, 1, first_stage_layers=1, last_stage_layers=1),
]
ROLLOUTS = [*product([1, 2, 4], [1, 2])]
MODELS = [
    tiny_spec(num_kv_heads=1, tied=True),
    tiny_spec(num_kv_heads=2, family="llama", tied=False),
    tiny_spec(num_kv_heads=4, tied=False),
    tiny_spec(num_kv_heads=2, tied=True),
    tiny_spec(num_kv_heads=2, family="glm"),
    tiny_spec(num_kv_heads=4, family="opt", tied=True),
    tiny_spec(num_kv_heads=4, family="opt", tied=True, projected_size=6, post_norm=True),
    tiny_spec(num_kv_heads=4, family="opt", projected_size=20),
    tiny_spec(num_kv_heads=2, family="qwen3_moe", num_experts=2, experts_per_token=1),
]


def worlds_of(train: Layout) -> list[World]:
    """Rollouts on the training ranks, on ranks of their own, and on some of both, where they fit."""
    size = len(train.ranks)
    rollouts = [rollout_layout(train, tp, pp) for tp, pp in ROLLOUTS if size % (tp * pp) == 0]
    for tp, pp in ROLLOUTS:
        rollouts.append(standalone_layout(tuple(range(size, size + tp * pp)), tp, pp))
    rollouts.append(standalone_layout(tuple(range(size, size + 6)), 2, 1))
    rollouts.append(standalone_layout(tuple(range(size - 1, size + 3)), 2, 1))
    return [World(spec, train, rollout) for rollout in rollouts for spec in MODELS]


def _is_default(train: Layout) -> bool:
    """Up to two ranks, and one layout that is cut in all ways."""
    return len(train.ranks) < 3 or (train.tp, train.pp, train.vpp) == (2, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [pytest.param(train, marks=() if _is_default(train) else pytest.mark.thorough) for train in TRAINING],
    ids=lambda t: f"tp{t.tp}pp{t.pp}dp{t.dp}vpp{t.vpp}",
)
def test_the_engine_gets_every_element_and_no_rank_more_than_it_lacks(train: Layout) -> None:
    for world in worlds_of(train):
        check_operations(world)
        check_traffic(world)
        check_ways(world)
        check_buckets(world)


MIXTURE = tiny_spec(num_kv_heads=2, family="qwen3_moe", num_experts=8, experts_per_token=2)
EXPERT_LAYOUTS = [  # tp, pp, dp, ep, etp
    *[(2, 1, 1, 2, 1), (2, 2, 1, 2, 1), (2, 1, 2, 2, 1), (4, 1, 1, 4, 1), (4, 1, 1, 2, 2), (4, 2, 1, 4, 1)],
    # experts that several replicas share
    *[
        (1, 1, 2, 2, 1),
        (1, 1, 4, 2, 1),
        (1, 2, 2, 2, 1),
        (2, 1, 2, 4, 1),
        (2, 1, 2, 2, 2),
        (1, 1, 4, 2, 2),
        (2, 2, 2, 4, 1),
    ],
]
EXPERTS_BY_DEFAULT = ((2, 2, 1, 2, 1), (2, 1, 2, 4, 1), (1, 1, 4, 2, 2))  # within a replica, over replicas, cut


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(x, marks=() if x in EXPERTS_BY_DEFAULT else pytest.mark.thorough) for x in EXPERT_LAYOUTS],
    ids=lambda sizes: "tp{}pp{}dp{}ep{}etp{}".format(*sizes),
)
def test_the_engine_gets_every_expert_and_no_rank_more_than_it_lacks(sizes: tuple[int, ...]) -> None:
    tp, pp, dp, ep, etp = sizes
    train = layout(tp, pp, dp, ep=ep, etp=etp)
    size = len(train.ranks)
    for tp_of_engine, pp_of_engine, whole in product([1, 2, 4], [1, 2], [False, True]):
        sizes_of_engine = {"tp": tp_of_engine, "pp": pp_of_engine, "expert_parallel": whole}
        rollouts = [standalone_layout(tuple(range(size, size + tp_of_engine * pp_of_engine)), **sizes_of_engine)]
        if size % (tp_of_engine * pp_of_engine) == 0:
            rollouts.append(rollout_layout(train, **sizes_of_engine))
        for rollout in rollouts:
            world = World(MIXTURE, train, rollout)
            check_operations(world)
            check_traffic(world)
            check_ways(world)
            check_buckets(world)


@pytest.mark.parametrize("rollout", [(1, 1), (2, 1), (4, 1), (1, 2)])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_ranks_that_share_tokens_send_and_receive_like_replicas(ep: int, rollout: tuple[int, int]) -> None:
    spec, ranks = tiny_spec() if ep == 1 else MIXTURE, tuple(range(8))
    beside = standalone_layout(tuple(range(8, 8 + 2 * prod(rollout))), *rollout)
    alike = [Layout(1, 2, dp, ranks, ep=ep, cp=4 // dp) for dp in (4, 2, 1)]
    for made in ([rollout_layout(train, *rollout) for train in alike], [beside] * 3):
        assert made[0] == made[1] == made[2]
        first, *others = [plan_reshard(spec, train, made[0]) for train in alike]
        for plan, rank in product(others, made[0].ranks):
            assert plan.traffic(rank) == first.traffic(rank) and plan.operations(rank) == first.operations(rank)
            assert plan.received_elements(rank) == first.received_elements(rank)
        for plan, rank in product(others, ranks):
            assert plan.traffic(rank) == first.traffic(rank)
            assert plan.sent_elements(rank) == first.sent_elements(rank)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_experts_cut_as_the_engine_cuts_them_are_neither_sent_nor_copied(num_ranks: int) -> None:
    train = layout(num_ranks, 1, 1, ep=num_ranks)
    spec = tiny_spec(num_heads=8, num_kv_heads=8, family="qwen3_moe", num_experts=8, experts_per_token=2)
    plan = plan_reshard(spec, train, rollout_layout(train, num_ranks, 1, expert_parallel=True))
    assert plan.is_in_place
    for rank in train.ranks:
        assert plan.received_elements(rank) == plan.sent_elements(rank) == 0
        ways_of = {op.way for op in plan.operations(rank) if ".experts." in op.weight.megatron}
        assert ways_of == {Way.ALIAS}


# ---------------------------------------------------------------------------------------------------- by hand


def ways(plan: ReshardPlan, rank: int) -> dict[str, Way]:
    """Of layer 0 and what lies outside the layers, by the end of its name."""
    return {op.weight.megatron.removeprefix("decoder.layers.0."): op.way for op in plan.operations(rank)}


def operation_of(plan: ReshardPlan, rank: int, name: str) -> Operation:
    return next(op for op in plan.operations(rank) if op.weight.megatron.endswith(name))


def test_one_rank_permutes_qkv_and_aliases_the_rest() -> None:
    plan = plan_reshard(tiny_spec(num_layers=1), layout(1, 1, 1), rollout_layout(layout(1, 1, 1), 1, 1))
    found = ways(plan, 0)
    assert [name for name, way in found.items() if way is Way.PERMUTE] == [
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
    ]
    assert set(found.values()) == {Way.ALIAS, Way.PERMUTE}
    # q0 q1 k0 v0 q2 q3 k1 v1
    assert operation_of(plan, 0, "linear_qkv.bias").order == (0, 1, 4, 5, 2, 6, 3, 7)
    assert operation_of(plan, 0, "linear_qkv.weight").shape == (16, 3)
    assert operation_of(plan, 0, "linear_qkv.bias").shape == (16,)
    assert plan.permuted_elements(0) == 16 * 3 + 16
    assert plan.received_elements(0) == 0
    assert [bucket for bucket in plan.traffic(0) if bucket != ((), ())] == []


def test_two_training_ranks_to_engines_of_one() -> None:
    train = layout(2, 1, 1)
    plan = plan_reshard(tiny_spec(num_layers=1, family="llama"), train, rollout_layout(train, 1, 1))
    assert ways(plan, 1) == {
        "embedding.word_embeddings.weight": Way.GATHER,
        "input_layernorm.weight": Way.ALIAS,
        "self_attention.linear_qkv.weight": Way.GATHER,
        "self_attention.linear_proj.weight": Way.GATHER,
        "pre_mlp_layernorm.weight": Way.ALIAS,
        "mlp.linear_fc1.weight": Way.GATHER,
        "mlp.linear_fc2.weight": Way.GATHER,
        "decoder.final_layernorm.weight": Way.ALIAS,
        "output_layer.weight": Way.GATHER,
    }
    # half of everything that is split: embedding and output 64 x 3, qkv 16 x 3, proj 3 x 8, fc1 16 x 3, fc2 3 x 8
    assert plan.received_elements(1) == plan.sent_elements(0) == (2 * 64 * 3 + 48 + 24 + 48 + 24) // 2
    assert sum(prod(op.shape) for op in plan.operations(0)) == 528 + 9  # and the norms
    fc1 = operation_of(plan, 1, "linear_fc1.weight")  # gate is rows 0 to 8; the rank has the second half of each
    assert fc1.pieces == (
        (0, Piece(0, 0, 0, 0, 4, 3)),
        (1, Piece(4, 0, 0, 0, 4, 3)),
        (0, Piece(8, 0, 4, 0, 4, 3)),
        (1, Piece(12, 0, 4, 0, 4, 3)),
    )
    assert fc1.contains_training_shard and fc1.view is None and fc1.order == ()


def test_one_training_rank_a_replica_to_engines_of_two() -> None:
    train = layout(1, 1, 2)
    plan = plan_reshard(tiny_spec(num_layers=1, num_kv_heads=1), train, rollout_layout(train, 2, 1))
    assert plan.received_elements(0) == plan.received_elements(1) == 0
    fc1 = operation_of(plan, 1, "linear_fc1.weight")
    assert (fc1.way, fc1.order, fc1.view) == (Way.PERMUTE, (1, 3, 0, 2), View(0, 8, 0, 3))
    assert not fc1.contains_training_shard
    proj = operation_of(plan, 1, "linear_proj.weight")
    assert (proj.way, proj.shape, proj.view) == (Way.ALIAS, (3, 4), View(0, 3, 4, 4))
    qkv = operation_of(plan, 0, "linear_qkv.weight")  # q0 q1 q2 q3 k v as blocks of two heads
    assert (qkv.way, qkv.order, qkv.view) == (Way.PERMUTE, (0, 2, 1), View(0, 8, 0, 3))
    assert operation_of(plan, 1, "linear_qkv.weight").view == View(4, 8, 0, 3)
    embedding = operation_of(plan, 1, "word_embeddings.weight")
    assert (embedding.way, embedding.view) == (Way.ALIAS, View(32, 32, 0, 3))
    assert plan.permuted_elements(0) == 48 + 12 * 3 + 12  # fc1, qkv, its bias
    assert plan.permuted_elements(1) == 48


@pytest.mark.parametrize(
    ("training", "rollout"),
    [((4, 2, 1), (2, 1)), ((4, 2, 1), (1, 1)), ((4, 2, 1), (2, 2)), ((2, 2, 2), (2, 1)), ((2, 4, 1), (1, 2))],
    ids=str,
)
def test_the_split_weights_of_layers_cost_what_the_paper_says(training: tuple, rollout: tuple) -> None:
    """HybridFlow, section 5.3: (tp pp - tg pg) / (tg pg tp pp) M on every rank, and no redundant memory."""
    (tp, pp, dp), (tg, pg) = training, rollout
    train = layout(tp, pp, dp)
    plan = plan_reshard(tiny_spec(num_kv_heads=4), train, rollout_layout(train, tg, pg))
    # a layer: qkv (24, 3) and (24,), proj (3, 8), fc1 (16, 3), fc2 (3, 8)
    size = 4 * (72 + 24 + 24 + 48 + 24)
    for rank in train.ranks:
        operations = [op for op in plan.operations(rank) if "linear_" in op.weight.megatron]
        received = sum(p.num_elements for op in operations for source, p in op.pieces if source != rank)
        assert received * (tg * pg * tp * pp) == (tp * pp - tg * pg) * size
        mine = set(plan.trained_weights(rank))
        assert all(op.contains_training_shard for op in plan.operations(rank) if op.weight in mine)
        assert mine <= {op.weight for op in plan.operations(rank)}


def test_ranks_that_only_generate_are_dealt_out_over_the_replicas() -> None:
    train = layout(2, 1, 2)  # replicas (0, 1) and (2, 3)
    plan = plan_reshard(tiny_spec(num_layers=1), train, standalone_layout((4, 5, 6, 7), 1, 1))
    peers = {rank: {m.peer for bucket in plan.traffic(rank) for m in bucket.receives} for rank in (4, 5, 6, 7)}
    assert peers == {4: {0, 1}, 5: {2, 3}, 6: {0, 1}, 7: {2, 3}}
    norms = {rank: operation_of(plan, rank, "input_layernorm.weight").pieces[0][0] for rank in (4, 5, 6, 7)}
    assert norms == {4: 0, 5: 2, 6: 1, 7: 3}
    assert plan.operations(0) == plan.trained_weights(4) == ()
    assert plan.sent_elements(4) == plan.received_elements(0) == plan.lower_bound(0) == 0
    assert plan.received_elements(4) == plan.lower_bound(4) == sum(prod(op.shape) for op in plan.operations(4))


@pytest.mark.parametrize(
    ("training", "rollout", "replicas"),
    [((2, 1, 2), (2, 1), 4), ((1, 1, 4), (4, 1), 1), ((1, 2, 2), (1, 2), 2), ((1, 1, 2), (1, 2), 3)]
    + [((4, 1, 2), (2, 2), 2), ((2, 2, 2), (4, 1), 2)],
    ids=str,
)
def test_ranks_that_only_generate_ask_alike_of_all_replicas(training: tuple, rollout: tuple, replicas: int) -> None:
    train = layout(*training)
    ranks = tuple(range(100, 100 + prod(rollout) * replicas))
    plan = plan_reshard(tiny_spec(num_kv_heads=4), train, standalone_layout(ranks, *rollout))
    sent = {stage: [0] * train.tp * train.dp for stage in range(train.pp)}
    for rank in train.ranks:
        at = train.coordinates(rank)
        weights = (part for e in plan.traffic(rank) for m in e.sends for part in m.pieces)
        split = sum(piece.num_elements for weight, piece in weights if weight.split is not Split.REPLICATED)
        sent[at.pp][at.dp * train.tp + at.tp] = split
    assert all(len(set(elements)) == 1 for elements in sent.values()), sent


def test_a_tied_embedding_comes_from_the_receivers_own_stage() -> None:
    train = layout(1, 4, 1)
    plan = plan_reshard(tiny_spec(tied=True), train, rollout_layout(train, 1, 1))
    sources = [operation_of(plan, rank, "word_embeddings.weight").pieces[0][0] for rank in range(4)]
    assert sources == [0, 3, 0, 3]
    assert [operation_of(plan, rank, "word_embeddings.weight").way for rank in (0, 1, 3)] == [
        Way.ALIAS,
        Way.GATHER,
        Way.ALIAS,
    ]
    assert "output_layer.weight" not in ways(plan, 3)


def test_a_tied_embedding_for_other_ranks_comes_from_both_stages_by_turns() -> None:
    plan = plan_reshard(tiny_spec(tied=True), layout(1, 2, 1), standalone_layout((2, 3, 4, 5), 1, 1))
    assert [operation_of(plan, rank, "word_embeddings.weight").pieces[0][0] for rank in (2, 3, 4, 5)] == [0, 1, 0, 1]


# ---------------------------------------------------------------------------------------------------- buckets


def test_buckets_by_hand() -> None:
    train = layout(1, 2, 1)
    spec = tiny_spec(num_layers=2, family="llama")
    # embedding and output 192, a norm 3, qkv 48, proj 24, fc1 48, fc2 24
    plan = plan_reshard(spec, train, rollout_layout(train, 1, 2), bucket_elements=80)
    short = [[weight.megatron.removeprefix("decoder.").removesuffix(".weight") for weight in b] for b in plan.buckets]
    assert short == [
        ["layers.0.mlp.linear_fc2"],  # with the output layer, stage 1 would have 192 elements in it
        ["output_layer"],
        ["layers.0.mlp.linear_fc1", "final_layernorm", "layers.0.pre_mlp_layernorm", "layers.1.mlp.linear_fc2"]
        + ["layers.0.self_attention.linear_proj", "layers.1.mlp.linear_fc1"],
        ["layers.0.self_attention.linear_qkv", "layers.1.pre_mlp_layernorm", "layers.0.input_layernorm"]
        + ["layers.1.self_attention.linear_proj"],
        ["embedding.word_embeddings"],
        ["layers.1.self_attention.linear_qkv", "layers.1.input_layernorm"],
    ]


def test_every_stage_sends_in_every_bucket_of_alike_stages() -> None:
    train = layout(1, 4, 1)
    plan = plan_reshard(tiny_spec(), train, rollout_layout(train, 1, 1), bucket_elements=400)
    stages = [{w.megatron.split(".")[2] for w in b if "layers." in w.megatron} for b in plan.buckets]
    assert sum(found == {"0", "1", "2", "3"} for found in stages) >= len(stages) - 2 > 0


def test_one_bucket_where_all_fits() -> None:
    train = layout(2, 2, 1)
    assert len(plan_reshard(tiny_spec(), train, rollout_layout(train, 2, 1)).buckets) == 1


def test_plans_do_not_depend_on_bucket_sizes() -> None:
    train = layout(2, 2, 1)
    plans = [
        plan_reshard(tiny_spec(), train, rollout_layout(train, 1, 1), bucket_elements=size) for size in (1, 50, 10**9)
    ]
    assert [len(plan.buckets) for plan in plans][0::2] == [4 * 7 + 3, 1]
    for rank in train.ranks:
        assert plans[0].operations(rank) == plans[1].operations(rank) == plans[2].operations(rank)
        received = [
            Counter((m.peer, part) for bucket in plan.traffic(rank) for m in bucket.receives for part in m.pieces)
            for plan in plans
        ]
        assert received[0] == received[1] == received[2]


# ---------------------------------------------------------------------------------------------- the rest


def test_inverse_by_hand() -> None:
    assert inverse((0, 1, 4, 5, 2, 6, 3, 7)) == (0, 1, 4, 6, 2, 3, 5, 7)
    assert inverse((2, 0, 1)) == (1, 2, 0)
    assert inverse(()) == ()


def test_layers_that_do_not_fill_the_engine_are_refused() -> None:
    train = layout(1, 1, 4)
    with pytest.raises(ConfigError, match=r"rollout\.pipeline_parallel_size = 4 exceeds num_hidden_layers = 3"):
        plan_reshard(tiny_spec(num_layers=3), train, rollout_layout(train, 1, 4))


LARGE = dict(num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_heads=64, num_kv_heads=8, head_dim=128)


@pytest.mark.parametrize("rollout", ["tp8 pp1", "tp4 pp2", "standalone", "standalone tp4 pp2"])
def test_a_thousand_ranks(rollout: str) -> None:
    train = layout(8, 8, 16)
    spec = tiny_spec(**LARGE, vocab_size=128256, family="llama")
    layouts = {
        "tp8 pp1": lambda: rollout_layout(train, 8, 1),
        "tp4 pp2": lambda: rollout_layout(train, 4, 2),
        "standalone": lambda: standalone_layout(tuple(range(1024, 2048)), 8, 1),
        "standalone tp4 pp2": lambda: standalone_layout(tuple(range(1024, 2048)), 4, 2),
    }
    engines = layouts[rollout]()
    plan = plan_reshard(spec, train, engines)
    ranks = sorted({*train.ranks, *engines.ranks})
    assert sum(map(plan.sent_elements, ranks)) == sum(map(plan.received_elements, ranks)) > 0
    assert all(plan.received_elements(rank) == plan.lower_bound(rank) for rank in ranks)
    sent = [plan.sent_elements(rank) for rank in train.ranks]
    assert max(sent) < 1.2 * sum(sent) / len(sent)  # the ends have the embedding and the output layer besides
    norms = 161 * 8192
    split = num_parameters(spec, "lm") - norms
    # the engines hold the model 128 times; colocated, each rank's training shard lies in its engine shard
    held = 16 * (split + 8 * norms) if engines.ranks == train.ranks else 0
    assert sum(map(plan.received_elements, ranks)) == 128 * (split + engines.tp * norms) - held
    for rank in (engines.ranks[5], 1000):
        traffic = plan.traffic(rank)
        assert sum(m.num_elements for e in traffic for m in e.receives) == plan.received_elements(rank)
        assert sum(m.num_elements for e in traffic for m in e.sends) == plan.sent_elements(rank)


# -------------------------------------------------------------------------------------------------- in place


@pytest.mark.parametrize(
    ("train", "rollout", "in_place"),
    [
        ((2, 1, 2), (2, 1), True),
        ((1, 1, 4), (2, 2), True),
        ((2, 2, 1), (2, 2), True),
        ((2, 1, 2), (4, 1), False),  # ranks 0 and 3 have all they need, ranks 1 and 2 have not
        ((2, 1, 2), (1, 1), False),
        ((1, 2, 1), (1, 1), False),
    ],
)
def test_whether_weights_stay_is_one_answer_for_all_ranks(
    train: tuple[int, int, int], rollout: tuple[int, int], in_place: bool
) -> None:
    """Else some ranks of an engine would run CUDA graphs and others not."""
    layout = Layout(*train, ranks=tuple(range(train[0] * train[1] * train[2])))
    plan = plan_reshard(tiny_spec(), layout, rollout_layout(layout, *rollout))
    ways = {operation.way for rank in layout.ranks for operation in plan.operations(rank)}
    assert plan.is_in_place == in_place == (Way.GATHER not in ways)
    if train == (2, 1, 2) and rollout == (4, 1):
        assert [plan.received_elements(rank) > 0 for rank in layout.ranks] == [False, True, True, False]
