"""Findings and reports: what they say of themselves, and that JSON loses nothing."""

import json

import pytest

from hybridflow.inspection.findings import Finding, HealthReport, Host, gigabytes, rate, worst

OK = Finding("links", "link", "a - b", "2,000 MB/s", figures={"bytes_per_second": 2e9})
WARN = Finding("clocks", "clock", "b", "2.000 s ahead", "warn", "run chrony")
FAIL = Finding("inputs", "config", "b", "x.yaml: cannot be read", "fail", "mend it")


def report(*findings: Finding) -> HealthReport:
    hosts = (Host("a", 0, (0, 1)), Host("b", 1, (2, 3)))
    attention = {"training": "sdpa", "rollout": "CPU_ATTN"}
    return HealthReport("0.1.0", 4, hosts, "CPU", False, attention, 1.5, findings)


def test_a_report_is_as_bad_as_its_worst_line_and_only_failures_fail() -> None:
    assert [worst(s) for s in ([], ["ok"], ["ok", "warn"], ["fail", "warn"])] == ["ok", "ok", "warn", "fail"]
    found = [(report(*findings).status, report(*findings).exit_code) for findings in ((OK,), (OK, WARN), (FAIL, WARN))]
    assert found == [("ok", 0), ("warn", 0), ("fail", 1)]


def test_json_and_back() -> None:
    whole = report(OK, WARN, FAIL)
    tree = json.loads(json.dumps(whole.as_dict()))
    assert tree["status"] == "fail" and tree["hosts"][1] == {"name": "b", "node": 1, "ranks": [2, 3]}
    assert tree["findings"][0]["figures"] == {"bytes_per_second": 2e9}
    assert HealthReport.from_dict(tree) == whole


def test_what_is_not_ok_says_what_to_do() -> None:
    with pytest.raises(AssertionError, match="storage, free space: warn without advice"):
        Finding("storage", "free space", "a", "0.1 GiB", "warn")


def test_sizes_and_rates() -> None:
    assert [gigabytes(1 << 30), gigabytes(1.5e12)] == ["1.0 GiB", "1,397.0 GiB"]
    assert [rate(125_000), rate(9.9e6), rate(12.5e6), rate(2e9)] == ["0.12 MB/s", "9.9 MB/s", "12 MB/s", "2,000 MB/s"]
