"""Generation groups and engine stages, computed by hand."""

import re
from itertools import product
from pathlib import Path

import pytest

from hybridflow.architecture.sharing import check_parallel
from hybridflow.architecture.spec import ModelSpec
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.reshard.groups import engine_stages, rollout_layout, standalone_layout


def layout(tp: int, pp: int, dp: int, first: int = 0, **more: int) -> Layout:
    return Layout(tp, pp, dp, tuple(range(first, first + tp * pp * dp)), **more)


# (tp, pp, dp) of training, (tp, pp) of the rollout, the replicas: rank of stage p, tp rank t at p * tp + t
GROUPS = [
    ((1, 1, 1), (1, 1), [(0,)]),
    ((4, 1, 1), (4, 1), [(0, 1, 2, 3)]),
    ((4, 1, 1), (2, 1), [(0, 2), (1, 3)]),
    ((4, 1, 1), (1, 1), [(0,), (1,), (2,), (3,)]),
    ((4, 1, 1), (2, 2), [(0, 2, 1, 3)]),  # the second stage comes from the ranks in between
    ((1, 1, 4), (2, 1), [(0, 1), (2, 3)]),
    ((1, 1, 4), (2, 2), [(0, 1, 2, 3)]),
    ((1, 4, 1), (1, 2), [(0, 2), (1, 3)]),
    ((1, 4, 1), (2, 2), [(0, 1, 2, 3)]),
    ((1, 2, 1), (2, 1), [(0, 1)]),
    ((1, 2, 3), (2, 1), [(0, 3), (1, 4), (2, 5)]),  # 3 replicas lack a factor of 2, which the stages have
    ((3, 1, 2), (2, 1), [(0, 1), (2, 3), (4, 5)]),  # nothing divides
    ((2, 1, 3), (2, 3), [(0, 1, 2, 3, 4, 5)]),
    # of (tp 2, pp 2, dp 2) stage 0 has the replicas (0, 1), (2, 3), stage 1 has (4, 5), (6, 7)
    ((2, 2, 2), (2, 2), [(0, 1, 4, 5), (2, 3, 6, 7)]),
    ((2, 2, 2), (1, 2), [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ((2, 2, 2), (2, 1), [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ((2, 2, 2), (1, 1), [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
    ((2, 2, 2), (4, 1), [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ((2, 2, 2), (4, 2), [(0, 1, 2, 3, 4, 5, 6, 7)]),
    ((2, 2, 2), (8, 1), [(0, 1, 2, 3, 4, 5, 6, 7)]),
    ((2, 2, 2), (2, 4), [(0, 1, 2, 3, 4, 5, 6, 7)]),
    ((2, 2, 2), (1, 4), [(0, 2, 4, 6), (1, 3, 5, 7)]),
    ((2, 2, 2), (1, 8), [(0, 1, 2, 3, 4, 5, 6, 7)]),
    ((4, 2, 1), (2, 2), [(0, 2, 4, 6), (1, 3, 5, 7)]),
    ((4, 2, 1), (2, 1), [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ((8, 1, 1), (2, 1), [(0, 4), (1, 5), (2, 6), (3, 7)]),
]


@pytest.mark.parametrize(("training", "rollout", "replicas"), GROUPS, ids=str)
def test_groups_by_hand(training: tuple, rollout: tuple, replicas: list[tuple[int, ...]]) -> None:
    assert rollout_layout(layout(*training), *rollout) == RolloutLayout(*rollout, tuple(replicas))
    # the same on ranks that begin at 10
    moved = tuple(tuple(rank + 10 for rank in replica) for replica in replicas)
    assert rollout_layout(layout(*training, first=10), *rollout).replicas == moved


def test_the_groups_that_vllm_is_given_by_hand() -> None:
    found = rollout_layout(layout(4, 1, 1), 2, 2)
    assert found.tp_groups() == [[0, 2], [1, 3]]
    assert found.pp_groups() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("training", [*product([1, 2, 3, 4], repeat=3)], ids=str)
def test_every_rank_is_in_one_replica_and_groups_ascend(training: tuple[int, int, int]) -> None:
    train = layout(*training)
    size = len(train.ranks)
    for tp, pp in product(range(1, size + 1), range(1, size + 1)):
        if size % (tp * pp) == 0:
            found = rollout_layout(train, tp, pp)
            assert sorted(rank for replica in found.replicas for rank in replica) == list(train.ranks)
            groups = found.tp_groups() + found.pp_groups()
            assert all(group == sorted(group) for group in groups), (tp, pp, groups)
            assert {len(replica) for replica in found.replicas} == {tp * pp}


def test_standalone_groups_are_neighbours() -> None:
    found = standalone_layout((8, 9, 10, 11, 20, 21, 22, 23), 2, 2)
    assert found == RolloutLayout(2, 2, ((8, 9, 10, 11), (20, 21, 22, 23)))


def test_ranks_that_are_no_multiple_are_refused() -> None:
    message = (
        "rollout.tensor_parallel_size x rollout.pipeline_parallel_size = 4 x 2 = 8 does not divide the 12 ranks of "
        "the engine: 12 = 1 x 8 + 4"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        rollout_layout(layout(2, 2, 3), 4, 2)
    with pytest.raises(ConfigError, match=re.escape(message)):
        standalone_layout(tuple(range(12)), 4, 2)


# ------------------------------------------------------------------------------------------------------- stages


# training layout, layers, rollout pp, layers of each engine stage
STAGES = [
    (layout(1, 1, 1), 3, 1, [3]),
    (layout(1, 1, 1), 5, 2, [3, 2]),
    (layout(1, 1, 1), 7, 3, [3, 2, 2]),
    (layout(1, 2, 1), 4, 2, [2, 2]),
    (layout(1, 2, 1), 6, 4, [2, 1, 2, 1]),  # each training stage cut
    (layout(1, 4, 1), 8, 2, [4, 4]),
    (layout(1, 4, 1, first_stage_layers=1), 10, 2, [4, 6]),  # 1 3 | 3 3
    (layout(1, 4, 1, last_stage_layers=2), 8, 2, [4, 4]),
    (layout(1, 4, 1, first_stage_layers=2, last_stage_layers=1), 9, 4, [2, 3, 3, 1]),
    (layout(1, 2, 1, first_stage_layers=1), 5, 4, [2, 1, 1, 1]),  # a stage of 1 layer cannot be cut in 2
    (layout(1, 3, 1), 6, 2, [3, 3]),  # neither divides the other
    (layout(1, 2, 1, vpp=2), 8, 2, [4, 4]),  # the training stages are 0 1 4 5 and 2 3 6 7
    (layout(1, 2, 1, vpp=2, first_stage_layers=2), 8, 2, [4, 4]),
    (layout(1, 2, 1, vpp=2), 4, 1, [4]),
]


@pytest.mark.parametrize(("train", "num_layers", "pp", "counts"), STAGES)
def test_engine_stages_by_hand(train: Layout, num_layers: int, pp: int, counts: list[int]) -> None:
    stages = engine_stages(num_layers, train, standalone_layout(tuple(range(pp)), 1, pp))
    assert [len(layers) for layers in stages] == counts
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))


def test_fewer_layers_than_stages_are_refused() -> None:
    message = "rollout.pipeline_parallel_size = 4 exceeds num_hidden_layers = 3: a stage needs a layer"
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine_stages(3, layout(1, 1, 4), rollout_layout(layout(1, 1, 4), 1, 4))


# -------------------------------------------------------------------------------------------------------- model


def model(**changes: int) -> ModelSpec:
    fields = dict(num_heads=12, num_kv_heads=4, ffn_hidden_size=24, vocab_size=100, hidden_size=12, head_dim=2)
    rest = dict(path=Path("model"), family="llama", head="lm", num_layers=2, norm_eps=1e-6)
    return ModelSpec(**{**fields, **rest, **changes}, tied=False, max_positions=64)


@pytest.mark.parametrize(
    ("changes", "tp"), [({}, 1), ({}, 2), ({}, 4), ({"num_kv_heads": 1}, 4), ({"num_kv_heads": 2}, 4)]
)
def test_models_that_fit(changes: dict[str, int], tp: int) -> None:
    check_parallel(model(**changes), "rollout.tensor_parallel_size", tp)


@pytest.mark.parametrize(
    ("changes", "tp", "parts"),
    [
        ({}, 8, ["num_attention_heads = 12 of model", "12 = 1 x 8 + 4"]),
        ({"vocab_size": 190}, 6, ["num_key_value_heads = 4 of model", "6 = 1 x 4 + 2"]),
        ({"ffn_hidden_size": 30}, 4, ["intermediate_size = 30 of model", "30 = 7 x 4 + 2"]),
        ({"num_kv_heads": 3}, 3, ["padded vocab_size = 128 of model", "128 = 42 x 3 + 2"]),
    ],
)
def test_models_that_do_not_fit_are_refused(changes: dict[str, int], tp: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_parallel(model(**changes), "rollout.tensor_parallel_size", tp)
    for part in [f"rollout.tensor_parallel_size = {tp}", *parts]:
        assert part in str(error.value)
