"""`python -m hybridflow.report`: its messages, and its page in a real browser, as wide as a desk's and as a phone's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.cli.report import main
from tests.browser import Browser, program
from tests.messages import like
from tests.reporting.run_dirs import HOSTILE, make_run

VIEWS = {"desktop": (1280, 900, False), "phone": (390, 844, False), "phone, dark": (390, 844, True)}
NUM_METRICS = 8


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs, the second of which is longer than a chart has points for."""
    root = tmp_path_factory.mktemp("report")
    one, two = make_run(root / "math"), make_run(root / "code", seed=2, num_iterations=1001, layout=False)
    assert main([str(one), str(two), "--output", str(root / "out" / "report.html")]) == 0
    return root / "out" / "report.html"


@pytest.fixture(scope="module", params=VIEWS)
def browser(request: pytest.FixtureRequest, report: Path) -> Iterator[Browser]:
    program()
    width, height, dark = VIEWS[request.param]
    with Browser(width=width, height=height, dark=dark) as browser:
        browser.open(report)
        yield browser


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")


def count(browser: Browser, selector: str) -> int:
    """Of those that can be seen."""
    found = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return browser.value(f"{found}.filter(e => e.getClientRects().length).length")


def enter(browser: Browser, element: str, property: str, value: object, event: str) -> None:
    """Set what a user would, and wait until it is drawn."""
    browser.value(
        f"(e => {{ e.{property} = {json.dumps(value)}; e.dispatchEvent(new Event('{event}')); }})"
        f"(document.getElementById('{element}')); "
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
    )


# ------------------------------------------------------------------------------------------------ in a browser


def test_nothing_is_complained_of_loaded_or_wider_than_the_screen(browser: Browser, report: Path) -> None:
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [report.resolve().as_uri()]
    assert browser.value("document.documentElement.scrollWidth - innerWidth") == 0
    outside = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.wide, svg, nav') && "
    assert browser.value(outside + "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)") == []


def test_the_colours_are_those_that_the_reader_has_chosen(browser: Browser) -> None:
    light = browser.value("matchMedia('(prefers-color-scheme: light)').matches")
    back = "rgb(246, 247, 249)" if light else "rgb(20, 23, 27)"
    assert browser.value("getComputedStyle(document.body).backgroundColor") == back


def test_every_metric_of_both_runs_is_drawn(browser: Browser) -> None:
    assert len(texts(browser, ".charts h3")) == NUM_METRICS
    assert texts(browser, "summary") == ["eval 1", "reward 2", "actor 1", "time 4"]
    assert count(browser, ".charts path.curve") == 2 * NUM_METRICS
    assert count(browser, ".charts path.band") == NUM_METRICS - 1  # eval/accuracy of 334 points is drawn whole
    # iteration 3 is not finite: the curve of the first run has a gap, a mark below it, and goes on
    loss = "figure[data-metric='actor/loss']"
    d = browser.value(f'document.querySelector("{loss} path.k0").getAttribute("d")')
    assert (d.count("M"), d.count("L")) == (2, 3)  # 1 to 2, 4 to 5 to 6
    assert count(browser, f"{loss} rect.lost") == 2
    ticks = browser.value(f'[...document.querySelectorAll("{loss} text")].map(e => e.textContent)')
    assert {"0", "0.5", "1"} <= set(ticks)


def test_a_long_run_is_said_to_be_thinned_out(browser: Browser) -> None:
    assert texts(browser, ".note") == [
        like(
            "code: its 1,002 iterations are more than a chart has points for: a point is the mean of 3, and the band "
            "around the line reaches from the least to the largest of them"
        )
    ]
    assert texts(browser, "#legend b") == ["math", "code"]
    assert texts(browser, "#legend small") == ["iterations 0 to 6", "iterations 0 to 1001"]


def test_search_leaves_what_has_all_words(browser: Browser) -> None:
    enter(browser, "search", "value", "Score reward", "input")
    assert count(browser, "figure[data-metric]") == 1 and count(browser, ".charts path.curve") == 2
    assert count(browser, "summary") == 1 and texts(browser, "details:not([hidden]) summary") == ["reward 1 of 2"]
    enter(browser, "search", "value", "nothing", "input")
    assert count(browser, "figure[data-metric]") == 0 and count(browser, "#none") == 1
    enter(browser, "search", "value", "", "input")
    assert count(browser, ".charts path.curve") == 2 * NUM_METRICS and count(browser, "#none") == 0


def test_smoothing_draws_the_mean_over_the_raw_curve(browser: Browser) -> None:
    enter(browser, "smoothing", "value", 0.5, "input")
    assert texts(browser, "#smoothed") == ["0.50"]
    assert count(browser, ".charts path.raw") == count(browser, ".charts path.line") == 2 * NUM_METRICS
    # of 1, 2: 1 and (0.5 * 0.5 * 1 + 0.5 * 2) / 0.75
    smoothed = browser.value("smooth([1, 2, null, 2]).map(x => x === null ? x : Math.round(1e6 * x))")
    assert smoothed == [1_000_000, 1_666_667, None, 1_857_143]
    enter(browser, "smoothing", "value", 0, "input")
    assert count(browser, ".charts path.raw") == 0


def test_a_run_can_be_hidden(browser: Browser) -> None:
    box = "document.querySelectorAll('#legend input')[1].click()"
    enter(browser, "search", "value", "", "input")
    browser.value(f"{box}; new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
    assert count(browser, ".charts path.k0") == NUM_METRICS and count(browser, ".charts path.k1") == 0
    browser.value(f"{box}; new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
    assert count(browser, ".charts path.curve.k1") == NUM_METRICS


def test_a_pointer_is_told_iteration_and_values(browser: Browser) -> None:
    browser.point_at("figure[data-metric='reward/score_mean'] svg")
    title, one, two = browser.value("[...document.querySelector('.tip').children].map(e => e.textContent)")
    assert not browser.value("document.querySelector('.tip').hidden")
    start, end = title.removeprefix("reward/score_mean, iterations ").split(" to ")
    assert int(end) == int(start) + 2 and 400 < int(start) < 600
    assert one == "math at 6: 6"
    middle = 2 * (int(start) + 1)
    assert two == f"code: mean {middle} ({middle - 2} to {middle + 2})"
    browser.point_at("h1")
    assert browser.value("document.querySelector('.tip').hidden")


def test_phases_are_stacked(browser: Browser) -> None:
    assert count(browser, ".stack path.area") == 2 * 3
    assert texts(browser, ".stack .keys b")[:3] == ["rollout", "estimate", "update"]
    rows = texts(browser, ".phaserun:first-child td")
    assert rows == ["update", "6.5", "", "rollout", "2", "", "generate", "1.5", "", "estimate", "1", ""]
    top = browser.value("document.querySelector('.stack path.p2').getBBox().height")
    bottom = browser.value("document.querySelector('.stack path.p1').getBBox().height")
    assert top > 3 * bottom  # 4 to 9 seconds on 3, against 1 second


def test_the_layout_is_drawn_and_a_rank_found_in_it(browser: Browser) -> None:
    assert texts(browser, "#layouts > h3") == ["math: 4 ranks", "code: not known, its directory has no layout.json"]
    assert texts(browser, ".role h3") == ["actor", "critic", "rollout"]
    assert texts(browser, ".rank") == ["0", "1", "2", "3", "2", "3", "0", "1", "2", "3"]
    browser.value("document.querySelectorAll('.rank')[2].click()")
    assert texts(browser, "#chosen") == [
        like("Rank 2 of 4 in math: actor tp 0, pp 1, dp 0; critic tp 0, pp 0, dp 0; rollout tp 0, pp 0, replica 1")
    ]
    assert texts(browser, ".rank.chosen") == ["2", "2", "2"]


def test_samples_by_iteration_are_text_whatever_they_hold(browser: Browser) -> None:
    assert texts(browser, "#samplenumber") == ["6"]
    assert texts(browser, ".sample pre") == ["6 + 6 =", f"{HOSTILE} 12", "12", '{"rule": 0.25}']
    enter(browser, "sampleat", "value", 1, "input")
    assert texts(browser, ".sample pre") == ["2 + 2 =", f"{HOSTILE} 4", "4", '{"rule": 0.25}']
    assert texts(browser, ".score") == ["score 0.25"]
    enter(browser, "samplerun", "value", "1", "change")
    assert texts(browser, ".sample pre") == ["1001 + 1001 =", f"{HOSTILE} 2002", "2002", '{"rule": 0.5}']
    hint = "Of the 1,001 iterations with samples the page has 100, evenly spaced. "
    assert texts(browser, "#samplehint") == [hint]
    enter(browser, "samplerun", "value", "0", "change")
    assert browser.value("typeof window.hacked") == "undefined" and count(browser, "img") == 0


def test_configs_and_how_they_differ(browser: Browser) -> None:
    assert texts(browser, "#config label") == [" only what differs (1 of 5 keys)"]
    assert count(browser, "#config tr:has(td)") == 1
    assert texts(browser, "#config tr.differs td") == ["seed", "1", "2"]
    enter(browser, "differ", "checked", False, "change")
    assert count(browser, "#config tr:has(td)") == 5
    assert HOSTILE in texts(browser, "#config td.value")[4]
    enter(browser, "differ", "checked", True, "change")


@pytest.mark.slow
def test_ten_thousand_iterations_stay_usable(tmp_path: Path) -> None:
    """70 metrics of 10,000 iterations: a page of a few megabytes, drawn anew in well under a second."""
    run = make_run(tmp_path / "run")
    names = ["iteration", *(f"area{i % 7}/metric_{i}" for i in range(70))]
    rows = (",".join([str(i), *(f"{(i * 37 + k) % 101 / 7:.17g}" for k in range(70))]) for i in range(1, 10_001))
    (run / "metrics.csv").write_text("\n".join([",".join(names), *rows, ""]))
    output = tmp_path / "report.html"
    assert main([str(run), "--output", str(output)]) == 0
    assert output.stat().st_size < 4e6
    program()
    with Browser(width=1280, height=900) as browser:
        browser.open(output)
        assert count(browser, ".charts path.curve") == 70
        seconds = browser.value(
            "(() => { const began = performance.now(); redraw(); return performance.now() - began; })()"
        )
        assert seconds / 1e3 < 2.0, "0.1 s on an idle machine"


# ------------------------------------------------------------------------------------------------ the command


def test_what_is_wrong_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent"), "--output", str(tmp_path / "report.html")]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error == (
        like(
            f"hybridflow.report: error: {tmp_path}/absent: no such directory; a run's is OUTPUT_DIR/NAME of its "
            f"config, "
            "such as runs/quickstart\n"
        )
    )
    assert list(tmp_path.iterdir()) == []
    run = make_run(tmp_path / "run")
    (tmp_path / "file").touch()
    assert main([str(run), "--output", str(tmp_path / "file" / "report.html")]) == 1
    out, error = capsys.readouterr()
    assert error == like(f"hybridflow.report: error: {tmp_path}/file/report.html: cannot be written: File exists\n")


def test_where_the_page_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["run"]) == 0
    assert capsys.readouterr().out == "report.html: 1 run\n"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
