"""Who is on which host, and who is missing: by made-up ranks."""

from hybridflow.inspection.examination import hosts_of, missing_findings
from hybridflow.inspection.findings import Host


def test_hosts_by_torchruns_nodes() -> None:
    assert hosts_of({0: ("a", 0), 1: ("a", 0), 2: ("b", 1)}) == (Host("a", 0, (0, 1)), Host("b", 1, (2,)))


def test_two_nodes_of_one_name() -> None:
    told = {2: ("vm", 1), 0: ("vm", 0), 1: ("vm", 0), 3: ("other", 2)}
    assert [(host.name, host.ranks) for host in hosts_of(told)] == [("vm#0", (0, 1)), ("vm#1", (2,)), ("other", (3,))]


def test_the_missing_are_named_by_host_where_it_is_known() -> None:
    hosts = (Host("a", 0, (0, 1)), Host("b", 1, (2,)))
    missing = {2: "looking at inputs", 3: "has not started", 4: "has not started", 5: "has not started"}
    found = missing_findings(missing, {0: "a", 1: "b"}, hosts, 2)
    assert [(finding.host, finding.value) for finding in found] == [
        ("b", "ranks 2-3 are silent: looking at inputs, has not started"),
        ("torchrun's node 2", "ranks 4-5 are silent: has not started"),
    ]
    assert {finding.status for finding in found} == {"fail"}
    assert missing_findings({}, {}, hosts, 2) == []
