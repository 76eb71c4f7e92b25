"""Training layouts handed to engines in rollout layouts: tokens, bytes, memory."""

import json
from pathlib import Path

import pytest

from tests.covering import params
from tests.distributed.cases import make_family
from tests.distributed.pairs import BUCKET_BYTES, DEFAULT, LARGEST_WEIGHT_BYTES, REST, WEEKLY, Pair
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed


every_pair = pytest.mark.parametrize("pair", params(DEFAULT, REST, WEEKLY), ids=lambda pair: pair.name)


@pytest.fixture(scope="module")
def checkpoints(selected, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in sorted({pair.family for pair in selected("pair")}):
        make_family(root, name, head_dim=32)
    return root


@pytest.fixture(scope="module")
def results(checkpoints: Path, selected, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict]]]:
    """Pair name -> rank -> hand-off -> what was seen."""
    out, found = tmp_path_factory.mktemp("results"), {}
    for num_ranks in sorted({pair.num_ranks for pair in selected("pair")}):
        names = sorted(pair.name for pair in selected("pair") if pair.num_ranks == num_ranks)
        run_ranks(num_ranks, "tests.distributed.pairs_worker", checkpoints, out, *names)
        ranks = json.loads((out / f"{num_ranks}.json").read_text())
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return found


def hand_offs(results: dict, pair: Pair) -> list[dict]:
    """Those of all ranks, the first and the later one of each."""
    return [record for rank in results[pair.name] for record in rank]


@every_pair
def test_greedy_tokens_equal_huggingface_on_every_replica(pair: Pair, results: dict) -> None:
    records = hand_offs(results, pair)
    assert sum(record["generated"] for record in records) == 2 * pair.case.num_ranks
    assert all(record["right"] for record in records)


@every_pair
def test_bytes_are_the_plans_and_the_plans_the_lower_bound(pair: Pair, results: dict) -> None:
    for record in hand_offs(results, pair):
        planned, there, back = record["planned"], record["cost"], record["back"]
        assert there["bytes_received"] == planned["received"] == planned["bound"]
        assert there["bytes_sent"] == planned["sent"]
        assert there["bytes_permuted"] == back["bytes_permuted"] <= planned["permuted"]
        assert back["bytes_received"] == back["bytes_sent"] == 0


@every_pair
def test_training_weights_are_bitwise_restored(pair: Pair, results: dict) -> None:
    assert all(record["restored"] for record in hand_offs(results, pair))


@every_pair
def test_one_copy_of_the_weights(pair: Pair, results: dict) -> None:
    """Counted over all live tensors of the process: no more than a training storage twice and what is under way.

    A storage is closed when it has reached the bucket size, and a bucket of the engine holds one weight at least.
    """
    storage, bucket = BUCKET_BYTES + LARGEST_WEIGHT_BYTES, max(BUCKET_BYTES, LARGEST_WEIGHT_BYTES)
    for record in hand_offs(results, pair):
        counted, measured = record["cost"]["peak_extra_bytes"], record["measured_peak_extra"]
        if record["in_place"]:
            assert measured == 0 and counted <= 1 << 16  # one block of a permutation
        else:
            assert measured <= counted <= storage + bucket


def test_ranks_read_in_each_others_memory_or_send_messages(results: dict) -> None:
    """Both ways are compared with HuggingFace: the first hand-off, but for the last rank, is by reading."""
    for *ranks, last in results.values():
        for first, _ in ranks:
            assert (first["read"] > 0) == (first["cost"]["bytes_received"] > 0)
        for first, second in (*ranks, last):
            assert second["read"] == 0 and second["cost"]["bytes_received"] == first["cost"]["bytes_received"]
        assert last[0]["read"] == 0
    assert any(last[0]["cost"]["bytes_received"] for *_, last in results.values())


def test_most_pairs_need_more_than_the_trainers_memory(results: dict) -> None:
    """Else little was tested."""
    moved = [ranks for ranks in results.values() if not all(record["in_place"] for rank in ranks for record in rank)]
    assert len(moved) > len(results) / 2
