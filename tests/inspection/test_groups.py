"""What is told of the groups of a run, on simulated GPUs."""

from hybridflow.inspection.groups import group_finding, memory_finding

GIB = 1 << 30
FIRST = {rank: {"seconds": 1.0, "free_before": 79 * GIB, "free_after": 78 * GIB - rank} for rank in range(4)}
LAST = FIRST | {2: {"seconds": 0.5, "free_before": 78 * GIB, "free_after": 77 * GIB}}
ON_CPU = {rank: {"seconds": 0.25 * rank, "free_before": None, "free_after": None} for rank in range(4)}


def test_a_kind_of_groups_is_a_line() -> None:
    finding = group_finding([(0, 2), (1, 3)], FIRST)
    assert finding.name == "0,2, ..."
    assert finding.value == "2 of 2 ranks: 1.00 s at most, of rank 0; 1,024 MiB a rank at most"
    assert finding.figures == {"seconds": 1.0, "bytes": GIB + 3}
    assert group_finding([(0, 1, 2, 3)], ON_CPU).value == "1 of 4 ranks: 0.75 s at most, of rank 3"


def test_free_memory_is_told_before_and_after_of_the_rank_with_least() -> None:
    finding = memory_finding(FIRST, LAST)
    assert finding is not None and finding.value == "rank 2: 79.0 GiB free before all groups, 77.0 GiB after"
    assert finding.figures == {"free_before_bytes": 79 * GIB, "free_after_bytes": 77 * GIB}
    assert memory_finding(ON_CPU, ON_CPU) is None
