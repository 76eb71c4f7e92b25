"""Head orders by hand, which weights a plan permutes, and the hand-off to the engine and back."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridflow.models.spec import ModelSpec
from hybridflow.models.weights import (
    QKV_BIAS,
    QKV_WEIGHT,
    Weight,
    join_parts,
    local_slice,
    model_weights,
    shard_shape,
)
from hybridflow.reshard.plan import Way, head_order, inverse, plan_reshard
from hybridflow.reshard.transfer import WeightHandOff


def tiny_spec(**changes: object) -> ModelSpec:
    """2 layers of 4 query heads in 2 groups, head_dim 3; qkv of one layer is (24, 12) and (24,)."""
    fields = dict(
        path=Path("nowhere"),
        family="qwen2",
        head="lm",
        num_layers=2,
        hidden_size=12,
        ffn_hidden_size=10,
        num_heads=4,
        num_kv_heads=2,
        head_dim=3,
        vocab_size=70,
        norm_eps=1e-6,
        qkv_bias=True,
        tied=False,
        max_positions=64,
    )
    return ModelSpec(**{**fields, **changes})


# ----------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "order"),
    [
        # the trainer has q0 q1 k0 v0 | q2 q3 k1 v1, the engine q0 q1 q2 q3 | k0 k1 | v0 v1
        (4, 2, (0, 1, 4, 5, 2, 6, 3, 7)),
        (2, 2, (0, 3, 1, 4, 2, 5)),
        (6, 3, (0, 1, 4, 5, 8, 9, 2, 6, 10, 3, 7, 11)),
        (3, 1, (0, 1, 2, 3, 4)),
        (1, 1, (0, 1, 2)),
    ],
)
def test_head_order_by_hand(num_heads: int, num_kv_heads: int, order: tuple[int, ...]) -> None:
    assert head_order(num_heads, num_kv_heads) == order


def test_inverse_by_hand() -> None:
    assert inverse((0, 1, 4, 5, 2, 6, 3, 7)) == (0, 1, 4, 6, 2, 3, 5, 7)
    assert inverse((2, 0, 1)) == (1, 2, 0)
    assert inverse(()) == ()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (28, 4), (32, 8), (8, 8), (7, 1)])
def test_inverse_undoes_an_order(num_heads: int, num_kv_heads: int) -> None:
    order = head_order(num_heads, num_kv_heads)
    assert sorted(order) == list(range(num_heads + 2 * num_kv_heads))
    assert [order[i] for i in inverse(order)] == [inverse(order)[i] for i in order] == sorted(order)


# ------------------------------------------------------------------------------------------------------ plan


@pytest.mark.parametrize("bias", [False, True])
def test_a_plan_permutes_qkv_and_nothing_else(bias: bool) -> None:
    spec = tiny_spec(qkv_bias=bias)
    plan = plan_reshard(spec, tp=1)
    assert [operation.weight for operation in plan.operations] == list(model_weights(spec, "lm"))
    assert {operation.weight.megatron for operation in plan.permuted()} == {
        f"decoder.layers.{layer}.self_attention.linear_qkv.{kind}"
        for layer in range(2)
        for kind in (["weight", "bias"] if bias else ["weight"])
    }
    assert {operation.order for operation in plan.permuted()} == {(0, 1, 4, 5, 2, 6, 3, 7)}
    assert all(operation.order == () for operation in plan.operations if operation.way is Way.ALIAS)
    assert plan.permuted_elements == 2 * (24 * 12 + (24 if bias else 0))
    assert plan.received_elements == 0


def test_each_operation_counts_the_elements_of_its_shard() -> None:
    spec = tiny_spec()
    operations = plan_reshard(spec, tp=2).operations
    sizes = {operation.weight.megatron: operation.num_elements for operation in operations}
    assert sizes["embedding.word_embeddings.weight"] == 64 * 12
    assert sizes["decoder.layers.1.self_attention.linear_qkv.weight"] == 12 * 12
    assert sizes["decoder.layers.1.mlp.linear_fc1.weight"] == 10 * 12
    assert sizes["decoder.layers.1.mlp.linear_fc2.weight"] == 12 * 5
    assert sizes["decoder.final_layernorm.weight"] == 12


@pytest.mark.parametrize(("fields", "tp"), [({}, 2), ({"num_kv_heads": 1}, 1)])
def test_one_key_value_head_a_rank_leaves_nothing_to_permute(fields: dict[str, int], tp: int) -> None:
    plan = plan_reshard(tiny_spec(**fields), tp)
    assert {operation.way for operation in plan.operations} == {Way.ALIAS}
    assert plan.permuted_elements == plan.received_elements == 0


# -------------------------------------------------------------------------------------------------- hand-off


def hf_parts(weight: Weight, spec: ModelSpec, tp_rank: int, tp: int) -> list[Tensor]:
    """A rank's slices of parts that hold random numbers, the same ones whenever asked."""
    generator = torch.Generator().manual_seed(len(weight.megatron) + weight.shapes(spec)[0][0])
    parts = []
    for i, shape in enumerate(weight.shapes(spec)):
        dim, start, stop = local_slice(weight, i, spec, tp_rank, tp)
        parts.append(torch.randn(shape, generator=generator).bfloat16().narrow(dim, start, stop - start))
    return parts


def parameters(spec: ModelSpec, tp_rank: int = 0, tp: int = 1) -> dict[str, Tensor]:
    """A rank's megatron shards as views of one flat buffer, as ZeRO-1 has them."""
    weights = list(model_weights(spec, "lm"))
    found = [join_parts(weight, hf_parts(weight, spec, tp_rank, tp), spec, tp) for weight in weights]
    views = torch.cat([x.flatten() for x in found]).split([x.numel() for x in found])
    return {weight.megatron: view.view(x.shape) for weight, view, x in zip(weights, views, found, strict=True)}


@pytest.mark.parametrize(("tp_rank", "tp"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_the_engine_sees_its_layout_and_the_trainer_gets_its_own_back(tp_rank: int, tp: int, num_kv_heads: int) -> None:
    spec = tiny_spec(num_kv_heads=num_kv_heads)
    held = parameters(spec, tp_rank, tp)
    before = {name: x.clone() for name, x in held.items()}
    addresses = {name: x.data_ptr() for name, x in held.items()}
    hand_off = WeightHandOff(plan_reshard(spec, tp), held)
    for _ in range(2):
        hand_off.to_engine()
        for weight in model_weights(spec, "lm"):
            # vLLM's layout is the parts one after the other, for every weight; a rank's vocabulary is padded
            engine = torch.cat(hf_parts(weight, spec, tp_rank, tp))
            seen = held[weight.megatron][: len(engine)]
            assert torch.equal(seen, engine), weight.megatron
            assert held[weight.megatron].shape == shard_shape(weight, spec, tp)
        moved = {name for name, x in held.items() if not torch.equal(x, before[name])}
        assert moved == ({name for name in held if "qkv" in name} if num_kv_heads > tp else set())
        hand_off.to_trainer()
        assert all(torch.equal(x, before[name]) for name, x in held.items())
    assert {name: x.data_ptr() for name, x in held.items()} == addresses


def test_engine_layout_by_hand() -> None:
    # 4 query heads of one element in 2 groups
    spec = tiny_spec(num_layers=1, head_dim=1)
    held = parameters(spec)
    bias = held[QKV_BIAS.for_layer(0).megatron]
    bias.copy_(torch.tensor([0, 1, 10, 20, 2, 3, 11, 21]))  # q0 q1 k0 v0 q2 q3 k1 v1
    WeightHandOff(plan_reshard(spec, 1), held).to_engine()
    assert bias.tolist() == [0, 1, 2, 3, 10, 11, 20, 21]


def test_a_value_changed_in_between_returns_to_its_place() -> None:
    spec = tiny_spec(num_layers=1)
    held = parameters(spec)
    weight = held[QKV_WEIGHT.for_layer(0).megatron]
    hand_off = WeightHandOff(plan_reshard(spec, 1), held)
    hand_off.to_engine()
    weight[12:15] = 7.0  # the engine's rows of k0: behind 4 query heads of 3 rows
    hand_off.to_trainer()
    rows = (weight == 7.0).all(dim=1).nonzero().flatten().tolist()
    assert rows == [6, 7, 8]  # the trainer's: behind the 2 query heads of the group


def test_costs_count_the_bytes() -> None:
    spec = tiny_spec()
    hand_off = WeightHandOff(plan_reshard(spec, 1), parameters(spec))
    for cost in (hand_off.to_engine(), hand_off.to_trainer()):
        assert cost.bytes_permuted == 2 * (24 * 12 + 24) * 2  # layers x elements x bytes of bfloat16
        assert cost.bytes_received == 0
        assert cost.peak_extra_bytes == 3 * 12 * 2  # one head of the weight
        assert 0 < cost.seconds < 10


def test_nothing_moves_with_one_key_value_head_a_rank() -> None:
    spec = tiny_spec()
    cost = WeightHandOff(plan_reshard(spec, 2), parameters(spec, 0, 2)).to_engine()
    assert (cost.bytes_permuted, cost.bytes_received, cost.peak_extra_bytes) == (0, 0, 0)


def test_handing_off_twice_is_a_mistake() -> None:
    spec = tiny_spec()
    held = parameters(spec)
    before = {name: x.clone() for name, x in held.items()}
    hand_off = WeightHandOff(plan_reshard(spec, 1), held)
    with pytest.raises(AssertionError, match="in the trainer's layout already"):
        hand_off.to_trainer()
    hand_off.to_engine()
    with pytest.raises(AssertionError, match="in the engine's layout already"):
        hand_off.to_engine()
    hand_off.to_trainer()
    assert all(torch.equal(x, before[name]) for name, x in held.items())
