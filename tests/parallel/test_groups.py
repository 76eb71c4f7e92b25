"""What ranks do with their process groups before the engine is built, and what ranks of a replica say afterwards."""

import json
from typing import Any

import pytest

from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

ALL = [0, 1, 2, 3]
TENSOR_AND_PIPELINE = {  # each sends to the next stage by the pipeline's group, and back by the world's, as megatron
    0: [["all_reduce", [0, 1], None], ["isend", [0, 2], 2], ["irecv", ALL, 2]],
    3: [["all_reduce", [2, 3], None], ["irecv", [1, 3], 1], ["isend", ALL, 1]],
}
CHUNKS = {  # the last stage sends to the first
    0: [["isend", ALL, 1], ["irecv", ALL, 3], ["isend", ALL, 3], ["irecv", ALL, 1]],
    1: [["irecv", ALL, 0], ["isend", ALL, 2], ["irecv", ALL, 2], ["isend", ALL, 0]],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    out = tmp_path_factory.mktemp("groups") / "out.json"
    run_ranks(4, "tests.parallel.groups_worker", out)
    return json.loads(out.read_text())


def test_each_group_and_each_pair_of_stages_is_used_once(found: list[dict[str, Any]]) -> None:
    """Those of models that are trained: tests/distributed/test_order.py."""
    for name, expected in (("tp 2, pp 2", TENSOR_AND_PIPELINE), ("pp 4, two chunks", CHUNKS)):
        assert {rank: found[rank]["warmed"][name] for rank in expected} == expected
    assert [own["warmed"]["dp 4"] for own in found] == [[]] * 4, "nothing is sent there"


def test_vllm_is_told_of_custom_all_reduce_before_a_group_is_made(found: list[dict[str, Any]]) -> None:
    for own in found:
        assert [joined["custom"] for joined in own["joined"]] == [[False] * 3, [True] * 3]


def test_nobody_meets_to_make_a_group_of_one(found: list[dict[str, Any]]) -> None:
    """One meeting by NCCL and one by gloo for each replica, none for stages and ranks that are alone."""
    for own in found:
        assert [joined["met"] for joined in own["joined"]] == [[[0, 1], [0, 1], [2, 3], [2, 3]]] * 2
        assert [joined["sizes"] for joined in own["joined"]] == [[2, 1, 0]] * 2


def test_ranks_of_a_replica_that_have_drawn_other_tokens_are_named(found: list[dict[str, Any]]) -> None:
    told = [own["drawn"] for own in found]
    assert told[0] == told[1] and told[2:] == ["", ""]
    assert told[0].startswith("what the ranks of an engine replica have drawn differs between ranks: rank 1 has ")
