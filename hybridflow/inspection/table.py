"""A health report for people: one table, hosts that are alike in one row, and below it what to do."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.inspection.findings import Finding, HealthReport, Status, rate
from hybridflow.parallel.ranks import counted

STYLES: dict[Status, str | None] = {"ok": None, "warn": "yellow", "fail": "red"}
MANY = 6  # links that are well, of one kind, from which on they share a row


def print_report(report: HealthReport, console: Console) -> None:
    where = f"{counted(report.world_size, 'rank')} on {counted(len(report.hosts), 'host')}"
    table = Table(title=Text(f"hybridflow {report.version}: {where}, {report.device}"), title_justify="left")
    for column in ("", "what", "host", "found", ""):
        table.add_column(column, overflow="fold")
    rows = shown_rows(report)
    for i, row in enumerate(rows):
        repeated = i > 0 and rows[i - 1].area == row.area
        ends = i + 1 < len(rows) and rows[i + 1].area != row.area
        cells = ("" if repeated else row.area, row.name, row.host, row.value, row.status)
        table.add_row(*map(Text, cells), style=STYLES[row.status], end_section=ends)
    console.print(table)
    for line in advice_lines(report.findings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(summary(report), markup=False, highlight=False, soft_wrap=True)


def summary(report: HealthReport) -> str:
    counts = {status: sum(finding.status == status for finding in report.findings) for status in STYLES}
    return (
        f"{report.status}: {counts['fail']} failing, {counted(counts['warn'], 'warning')}, {counts['ok']} ok, "
        f"in {report.seconds:.0f} s"
    )


def advice_lines(findings: Iterable[Finding]) -> list[str]:
    """What to do about each thing that is not well, failures first."""
    unwell = sorted((f for f in findings if f.status != "ok"), key=lambda finding: finding.status != "fail")
    return [f"{f.status}: {f.area}, {f.name}, {f.host}: {f.value}. {f.advice}." for f in unwell]


def shown_rows(report: HealthReport) -> list[Finding]:
    """Areas together in the order in which they come up; what hosts have alike, and many good links, in one row."""
    areas = list(dict.fromkeys(finding.area for finding in report.findings))
    ordered = sorted(report.findings, key=lambda finding: areas.index(finding.area))
    return _alike(_few_links(ordered), len(report.hosts))


def _alike(findings: Sequence[Finding], num_hosts: int) -> list[Finding]:
    hosts: dict[tuple[str, str, str, Status], list[str]] = {}
    for finding in findings:
        hosts.setdefault((finding.area, finding.name, finding.value, finding.status), []).append(finding.host)
    rows = []
    for (area, name, value, status), named in hosts.items():
        host = f"all {num_hosts}" if 1 < num_hosts == len(named) else ", ".join(named)
        rows.append(Finding(area, name, host, value, status, advice="see below"))
    return rows


def _few_links(findings: Sequence[Finding]) -> list[Finding]:
    rows: list[Finding] = []
    folded: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.name == "link" and finding.status == "ok":
            folded.setdefault(finding.area, []).append(finding)
    for finding in findings:
        links = folded.get(finding.area, [])
        if finding not in links or len(links) < MANY:
            rows.append(finding)
        elif finding is links[0]:
            rates = [float(link.figures["bytes_per_second"] or 0) for link in links]
            value = f"{rate(min(rates))} to {rate(max(rates))}"
            rows.append(Finding(finding.area, "link", f"{len(links)} links", value))
    return rows
