"""Groupings and divisions, counted by hand."""

from hybridflow.automap.placements import Placement, divisions, partitions, placements, unit_of


def test_as_many_partitions_as_bell_counted() -> None:
    assert [len(partitions(tuple("abcde"[:count]))) for count in range(1, 6)] == [1, 2, 5, 15, 52]
    assert {frozenset(map(frozenset, groups)) for groups in partitions(("a", "b", "c"))} == {
        frozenset({frozenset("abc")}),
        frozenset({frozenset("ab"), frozenset("c")}),
        frozenset({frozenset("ac"), frozenset("b")}),
        frozenset({frozenset("bc"), frozenset("a")}),
        frozenset({frozenset("a"), frozenset("b"), frozenset("c")}),
    }


def test_divisions_are_the_compositions_of_a_number() -> None:
    assert list(divisions(4, 2)) == [(3, 1), (2, 2), (1, 3)]
    assert len(list(divisions(16, 4))) == 455  # 15 choose 3


def test_two_roles_on_three_ranks() -> None:
    found = [dict(placement) for placement in placements(("actor", "engine"), 3, ranks_per_host=8)]
    assert found == [
        {"actor": (0, 1, 2), "engine": (0, 1, 2)},
        {"actor": (0, 1), "engine": (2,)},
        {"actor": (2,), "engine": (0, 1)},
    ]


def test_units_are_whole_hosts_or_even_parts_of_one() -> None:
    assert [unit_of(count, 8) for count in (8, 16, 24, 64, 256, 1024)] == [1, 1, 2, 4, 16, 64]
    assert unit_of(6, 6) == 1
    assert unit_of(36, 6) == 3  # 4 divides no host


def test_groups_smaller_than_a_host_lie_on_one() -> None:
    for placement in placements(("actor", "critic", "reference"), 16, ranks_per_host=8):
        assert {rank for ranks in placement.values() for rank in ranks} == set(range(16))
        for ranks in placement.values():
            hosts = {rank // 8 for rank in ranks}
            assert len(ranks) % 8 == 0 or len(hosts) == 1, placement


def test_a_placement_tells_its_groups_by_rank() -> None:
    placement = Placement({"actor": (0, 1), "critic": (2, 3), "engine": (0, 1)})
    assert placement.groups == (("actor", "engine"), ("critic",))
    assert str(placement) == "actor + engine on 2 | critic on 2"
