"""Every pair once, no rank twice in a round."""

from itertools import combinations

import pytest

from hybridflow.inspection.examination import all_pairs, between_hosts, ring


def test_by_hand() -> None:
    assert all_pairs(4) == [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    assert all_pairs(3) == [[(1, 2)], [(0, 2)], [(0, 1)]]
    assert ring(4) == [[(0, 1), (2, 3)], [(1, 2), (0, 3)]]
    assert ring(5) == [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(0, 4)]]
    assert (all_pairs(1), all_pairs(2), ring(1), ring(2), ring(3)) == (
        [],
        [[(0, 1)]],
        [],
        [[(0, 1)]],
        [[(0, 1)], [(1, 2)], [(0, 2)]],
    )


@pytest.mark.parametrize("count", range(1, 40))
def test_rounds_are_disjoint_and_complete(count: int) -> None:
    neighbours = {tuple(sorted((i, (i + 1) % count))) for i in range(count)} - {(0, 0)}
    for rounds, expected in ((all_pairs(count), set(combinations(range(count), 2))), (ring(count), neighbours)):
        pairs = [pair for pairs in rounds for pair in pairs]
        assert len(pairs) == len(set(pairs)) and set(pairs) == expected
        for pairs in rounds:
            ends = [end for pair in pairs for end in pair]
            assert len(ends) == len(set(ends))
    assert len(all_pairs(count)) == (count - 1 if count % 2 == 0 else count if count > 1 else 0)


def test_many_hosts_are_measured_on_a_ring() -> None:
    assert sum(map(len, between_hosts(16))) == 120
    assert between_hosts(17) == ring(17) and len(between_hosts(17)) == 3
