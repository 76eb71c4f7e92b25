"""Groups under way: who goes on with which, what must end, what is trained on. Rows end in every order."""

import random

import pytest
import torch

from hybridflow.batch import PromptBatch
from hybridflow.config.sampling import SamplingConfig
from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout.partial import (
    PartialGroup,
    UnderWay,
    _shares,
    rollout_of_groups,
)
from hybridflow.rollout.row import CUT, ENDED, RUNNING, RolloutRow

SAMPLING = SamplingConfig(max_response_length=8, samples_per_prompt=2)


def group(position: int, iteration: int, *states: int) -> PartialGroup:
    rows = [RolloutRow([1] * 3, [-0.5] * 3, versions=[0] * 3, state=state, calls=1) for state in states]
    return PartialGroup(100 + position, position, iteration, [5, 6], rows)


def test_shares_are_in_proportion_and_whole() -> None:
    assert _shares(4, [3, 3]) == [2, 2]
    assert _shares(5, [4, 2, 2]) == [3, 1, 1]
    assert _shares(3, [2, 2, 2]) == [1, 1, 1]
    assert _shares(1, [3, 3]) == [1, 0]  # a tie goes to the first
    assert _shares(0, [0, 0]) == [0, 0]


def test_what_would_be_too_old_in_the_next_iteration_must_be_whole_now() -> None:
    under_way = UnderWay([group(0, 1, RUNNING), group(1, 1, RUNNING), group(2, 2, RUNNING), group(3, 2, RUNNING)])
    [work] = under_way.work(1, wanted=2, iteration=2, max_staleness=1, sampling=SAMPLING)
    assert (work.groups, work.number, work.urgent) == ((0, 1, 2, 3), 2, {0, 1})
    [work] = under_way.work(1, wanted=2, iteration=2, max_staleness=2, sampling=SAMPLING)
    assert (work.number, work.urgent) == (2, frozenset())
    [work] = under_way.work(1, wanted=2, iteration=3, max_staleness=2, sampling=SAMPLING)
    assert work.urgent == {0, 1}


def test_of_many_old_groups_some_must_be_whole_earlier() -> None:
    """Four groups are due in iteration 4 at the latest, and an iteration trains on two: two of them now."""
    under_way = UnderWay([group(i, 2, RUNNING) for i in range(4)])
    [work] = under_way.work(1, wanted=2, iteration=3, max_staleness=2, sampling=SAMPLING)
    assert work.urgent == {0, 1}


def test_rows_ask_for_what_is_left_with_a_seed_of_the_segment() -> None:
    under_way = UnderWay([group(7, 3, RUNNING, ENDED), PartialGroup(1, 8, 4, [9], [RolloutRow(), RolloutRow()])])
    found = under_way.requests([0, 1], 11, SAMPLING)
    assert list(found) == [(0, 0), (1, 0), (1, 1)]
    assert (found[0, 0].prompt, found[0, 0].num_before) == ([5, 6, 1, 1, 1], 3)
    assert found[0, 0].seed == request_seed(11, 3, 7, 0, 0, 1)
    assert found[1, 1].seed == request_seed(11, 4, 8, 1), "the first segment's is that of a synchronous run"


def test_tensors_give_back_the_same_groups() -> None:
    under_way = UnderWay([group(0, 1, RUNNING, CUT), PartialGroup(3, 1, 2, [4, 4, 4], [RolloutRow(), RolloutRow()])])
    assert UnderWay.of_tensors(under_way.tensors()).groups == under_way.groups
    assert UnderWay.of_tensors(UnderWay().tensors()).groups == []


def test_a_rollout_of_groups_has_the_version_of_each_token() -> None:
    whole = group(4, 2, ENDED, CUT)
    whole.rows[1].versions = [1, 1, 2]
    prompts = PromptBatch(torch.tensor([5, 6]), torch.tensor([2]), ("",), {})
    batch = rollout_of_groups([whole], prompts)
    assert batch.input_ids.tolist() == [5, 6, 1, 1, 1] * 2
    assert batch.truncated.tolist() == [False, True]
    assert batch.versions[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 2]
    assert batch.versions.dtype == torch.int32


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(("max_staleness", "oversample"), [(1, 1.0), (1, 1.5), (1, 2.0), (2, 2.0), (2, 3.0), (4, 3.5)])
def test_rows_that_end_in_any_order_are_trained_on_once_and_in_time(
    num_replicas: int, max_staleness: int, oversample: float
) -> None:
    """Engines end rows at random. Each iteration has its number of whole groups, none too old, and none is lost."""
    chance, wanted, drawn = random.Random(f"{num_replicas} {max_staleness} {oversample}"), 6, 0
    under_way, trained, ages = UnderWay(), list[int](), list[int]()
    for iteration in range(1, 40):
        for _ in range(int(oversample * wanted) - len(under_way.groups)):
            under_way.groups.append(PartialGroup(drawn, drawn, iteration, [1], [RolloutRow(), RolloutRow()]))
            drawn += 1
        found: dict[tuple[int, int], RolloutRow] = {}
        work = under_way.work(
            num_replicas, wanted=wanted, iteration=iteration, max_staleness=max_staleness, sampling=SAMPLING
        )
        dealt = sorted(place for part in work for place in part.groups)
        assert dealt == [place for place, each in enumerate(under_way.groups) if not each.is_whole]
        for part in work:
            assert part.number <= len(part.groups)
            order = list(under_way.requests(part.groups, 0, SAMPLING))
            chance.shuffle(order)
            left = {place: sum(key[0] == place for key in order) for place in part.groups}
            while True:
                whole = {place for place, count in left.items() if not count}
                if len(whole) >= part.number and part.urgent <= whole:
                    break
                key = order.pop()
                found[key], left[key[0]] = RolloutRow([2], [-1.0], state=ENDED, calls=1), left[key[0]] - 1
            found |= {key: RolloutRow([2], [-1.0], calls=1) for key in order if chance.random() < 0.7}
        under_way.add(found, iteration - 1)
        groups = under_way.take(wanted)
        assert len(groups) == wanted
        trained += [each.number for each in groups]
        ages += [iteration - 1 - version for each in groups for row in each.rows for version in row.versions]
    assert max(ages) <= max_staleness
    assert sorted(trained + [each.number for each in under_way.groups]) == list(range(drawn))
