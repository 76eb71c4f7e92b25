"""The table for people: hosts that are alike in one row, links that are well in one, advice below."""

from rich.console import Console

from hybridflow.inspection.findings import Finding, HealthReport, Host
from hybridflow.inspection.table import advice_lines, print_report, shown_rows, summary

HOSTS = tuple(Host(name, node, (node,)) for node, name in enumerate(("a", "b", "c")))


def report(*findings: Finding) -> HealthReport:
    return HealthReport("0.1.0", 3, HOSTS, "CPU", False, {}, 2.4, findings)


def test_what_is_alike_is_one_row() -> None:
    same = [Finding("packages", "torch", host.name, "2.13.0") for host in HOSTS]
    other = [Finding("packages", "vllm", name, value) for name, value in (("a", "1"), ("b", "1"), ("c", "2"))]
    rows = [(row.name, row.host, row.value) for row in shown_rows(report(*same, *other))]
    assert rows == [("torch", "all 3", "2.13.0"), ("vllm", "a, b", "1"), ("vllm", "c", "2")]


def test_areas_stay_together() -> None:
    findings = [Finding(area, str(i), "a", "x") for i, area in enumerate(("links", "clocks", "links"))]
    assert [row.name for row in shown_rows(report(*findings))] == ["0", "2", "1"]


def test_many_links_share_a_row_but_not_the_slow_one() -> None:
    links = [Finding("l", "link", f"{i}", f"{i} MB/s", figures={"bytes_per_second": (i + 1) * 10**8}) for i in range(6)]
    slow = Finding("l", "link", "9", "0.1 MB/s", "fail", "look", {"bytes_per_second": 10**5})
    rows = [(row.host, row.value, row.status) for row in shown_rows(report(*links, slow))]
    assert rows == [("6 links", "100 MB/s to 600 MB/s", "ok"), ("9", "0.1 MB/s", "fail")]
    assert len(shown_rows(report(*links[:5]))) == 5


def test_advice_begins_with_failures() -> None:
    warn = Finding("clocks", "clock", "b", "2 s ahead", "warn", "run chrony")
    fail = Finding("inputs", "config", "c", "no such file", "fail", "mend it")
    assert advice_lines([warn, fail]) == [
        "fail: inputs, config, c: no such file. mend it.",
        "warn: clocks, clock, b: 2 s ahead. run chrony.",
    ]
    assert summary(report(warn, fail)) == "fail: 1 failing, 1 warning, 0 ok, in 2 s"


def test_print(capsys) -> None:
    value = "[red]is no markup[/red]"
    print_report(report(Finding("inputs", "config", "c", value, "fail", "mend it")), Console(width=112))
    out = capsys.readouterr().out
    assert "hybridflow 0.1.0: 3 ranks on 3 hosts, CPU" in out
    assert out.count(value) == 2 and "fail: 1 failing, 0 warnings, 0 ok, in 2 s" in out
