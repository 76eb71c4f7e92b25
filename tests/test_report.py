"""`python -m hybridflow.report`: its messages, and its page in a real browser, as wide as a desk's and as a phone's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.cli.report import main
from hybridflow.config import ExperimentConfig
from tests.browser import Browser, program
from tests.launch import ROOT
from tests.messages import like
from tests.reporting.run_dirs import HOSTILE, make_run, write_start

pytestmark = pytest.mark.slow  # waits for processes

VIEWS = {"desktop": (1280, 900, False), "phone": (390, 844, False), "phone, dark": (390, 844, True)}
CHARTS = {  # those whose curves are not flat in both runs
    "eval/accuracy": "Held-out prompts answered right",
    "reward/score_mean": "Mean score of responses",
    "actor/loss": "Policy loss",
    "time/update_seconds": "Time of the update stage",
}
LONG = "".join(f"step {i}: {i} + 1 = {i + 1}\n" for i in range(100))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs, the second of which is longer than a chart has points for."""
    root = tmp_path_factory.mktemp("report")
    one, two = make_run(root / "math"), make_run(root / "code", seed=2, num_iterations=1001, layout=False)
    write_start(two, how="stopped", why="after iteration 1001 (SIGTERM)")
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
    return browser.value(f"{found}.filter(e => e.checkVisibility()).length")


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


def test_every_metric_that_changes_is_drawn_under_its_title(browser: Browser) -> None:
    assert texts(browser, ".charts h3") == list(CHARTS.values())
    assert texts(browser, ".charts .key") == list(CHARTS)
    assert texts(browser, "#groups summary") == ["eval 1", "reward 1", "actor 1", "time 1"]
    assert count(browser, ".charts path.curve") == 2 * len(CHARTS)
    assert count(browser, ".charts path.band") == len(CHARTS) - 1  # eval/accuracy of 334 points is drawn whole
    units = [texts(browser, f"figure[data-metric='{metric}'] .unit") for metric in CHARTS]
    assert units == [["share", "iteration"], ["iteration"], ["iteration"], ["s", "iteration"]]
    spoken = browser.value("document.querySelector(\"figure[data-metric='eval/accuracy'] svg\").ariaLabel")
    assert spoken == "Held-out prompts answered right, share: math 0.25 to 0.5; code 0.25 to 0.5"
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


def test_the_head_says_what_each_run_was(browser: Browser) -> None:
    assert texts(browser, "#legend h2 b") == ["math", "code"]
    assert texts(browser, "#legend .state") == ["Finished", "Stopped"]
    assert texts(browser, "#legend .what") == ["iteration 6", "after iteration 1001 (SIGTERM); iteration 1,001 is done"]
    facts = dict(zip(texts(browser, "li:first-child dt"), texts(browser, "li:first-child dd"), strict=True))
    assert facts == {
        "model": HOSTILE,
        "duration": "1 h 2 minfrom 2026-05-28 20:26 to 21:28 UTC",
        "command": "hybridflow train my.yaml name='a b'",
        "versions": "hybridflow 0.1.0, torch 2.13.0+cpu, commit 0123456789ab",
    }
    accuracy = texts(browser, "li:first-child .scores tr:nth-child(2) > *")
    assert accuracy == ["Held-out prompts answered righteval/accuracy", "25.0%", "50.0% iteration 3", "50.0%"]
    loss = texts(browser, "li:last-child .scores tr:nth-child(3) > *")
    assert loss == ["Mean score of responsesreward/score_mean", "2", "2002 iteration 1,001", "2002"]
    head, curves = (f"document.getElementById('{name}').getBoundingClientRect().top" for name in ("legend", "curves"))
    assert browser.value(f"{head} < {curves}")


def test_flat_curves_are_folded_away_until_a_person_opens_them(browser: Browser) -> None:
    assert texts(browser, "#flat > summary") == ["Flat: one value all along 4"]
    assert not browser.value("document.getElementById('flat').open") and count(browser, "#flat td") == 0
    browser.value("document.querySelector('#flat > summary').click()")
    assert count(browser, "#flat td") == 4 * 4
    rows = browser.value("[...document.querySelectorAll('#flat tr')].map(r => [...r.children].map(e => e.textContent))")
    assert rows == [
        ["metric", "name", "math", "code"],
        ["Reward: <b>x</b>", "reward/<b>x</b>", "1.00e-5", "1.00e-5"],
        ["Time of the rollout stage", "time/rollout_seconds", "2 s", "2 s"],
        ["Time of the estimate stage", "time/estimate_seconds", "1 s", "1 s"],
        ["Time of generation", "time/generate_seconds", "1.5 s", "1.5 s"],
    ]
    enter(browser, "search", "value", "generation", "input")
    assert texts(browser, "#flat > summary") == ["Flat: one value all along 1 of 4"] and count(browser, "#flat td") == 4
    assert not count(browser, "#none") and not count(browser, "#groups details")
    enter(browser, "search", "value", "", "input")
    browser.value("document.querySelector('#flat > summary').click()")


def test_search_leaves_what_has_all_words(browser: Browser) -> None:
    enter(browser, "search", "value", "Score reward", "input")
    assert count(browser, "figure[data-metric]") == 1 and count(browser, ".charts path.curve") == 2
    assert texts(browser, "#groups details:not([hidden]) summary") == ["reward 1"]
    enter(browser, "search", "value", "HELD-out right", "input")  # of the title
    assert texts(browser, "#groups details:not([hidden]) summary") == ["eval 1"]
    enter(browser, "search", "value", "nothing", "input")
    assert count(browser, "figure[data-metric]") == 0 and count(browser, "#none") == 1
    enter(browser, "search", "value", "", "input")
    assert count(browser, ".charts path.curve") == 2 * len(CHARTS) and count(browser, "#none") == 0


def test_smoothing_draws_the_mean_over_the_raw_curve(browser: Browser) -> None:
    enter(browser, "smoothing", "value", 0.5, "input")
    assert texts(browser, "#smoothed") == ["0.50"]
    assert count(browser, ".charts path.raw") == count(browser, ".charts path.line") == 2 * len(CHARTS)
    # of 1, 2: 1 and (0.5 * 0.5 * 1 + 0.5 * 2) / 0.75
    smoothed = browser.value("smooth([1, 2, null, 2]).map(x => x === null ? x : Math.round(1e6 * x))")
    assert smoothed == [1_000_000, 1_666_667, None, 1_857_143]
    enter(browser, "smoothing", "value", 0, "input")
    assert count(browser, ".charts path.raw") == 0


def test_a_run_can_be_hidden(browser: Browser) -> None:
    box = "document.querySelectorAll('#legend input')[1].click()"
    enter(browser, "search", "value", "", "input")
    browser.value(f"{box}; new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
    assert count(browser, ".charts path.k0") == len(CHARTS) and count(browser, ".charts path.k1") == 0
    browser.value(f"{box}; new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
    assert count(browser, ".charts path.curve.k1") == len(CHARTS)


def test_a_pointer_is_told_iteration_and_values(browser: Browser) -> None:
    browser.point_at("figure[data-metric='reward/score_mean'] svg")
    title, one, two = browser.value("[...document.querySelector('.tip').children].map(e => e.textContent)")
    assert not browser.value("document.querySelector('.tip').hidden")
    start, end = title.removeprefix("Mean score of responses, iterations ").split(" to ")
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
    assert texts(browser, "#config label:not([hidden])") == [" only what differs (1 of 5 keys)"]
    assert count(browser, "#config tr:has(td)") == 1
    assert texts(browser, "#config tr.differs td") == ["seed", "1", "2"]
    enter(browser, "differ", "checked", False, "change")
    assert count(browser, "#config tr:has(td)") == 5
    assert HOSTILE in texts(browser, "#config td.value")[4]
    widths = browser.value("[...document.querySelectorAll('#config td')].map(e => e.getBoundingClientRect().width)")
    assert min(widths) >= 100, "a narrow column makes a key a line of letters"
    enter(browser, "differ", "checked", True, "change")


@pytest.mark.parametrize("view", VIEWS)
def test_samples_are_put_in_order_by_a_click_and_long_texts_folded(tmp_path: Path, view: str) -> None:
    run = make_run(tmp_path / "run")
    rows = [("c", "ok", 0.5, "train"), ("a", LONG, -1.0, "train"), ("b", "x", 2.0, "train"), ("h", "y", 1.0, "heldout")]
    with (run / "samples.jsonl").open("a") as file:
        for prompt, response, score, kind in rows:
            sample = {"iteration": 7, "prompt": prompt, "response": response, "score": score, "kind": kind}
            file.write(json.dumps(sample | {"columns": {"answer": f"right {prompt}", "level": 3}}) + "\n")
    output = tmp_path / "report.html"
    assert main([str(run), "--output", str(output)]) == 0
    program()
    width, height, dark = VIEWS[view]
    with Browser(width=width, height=height, dark=dark) as browser:
        browser.open(output)
        titles = ["Iteration 7: held-out prompts, greedy responses", "Iteration 7: training prompts"]
        assert texts(browser, "#samplelist h3") == titles
        prompts = ".sample > pre:first-of-type"
        for order, expected in (("worst", "hacb"), ("prompt", "habc"), ("best", "hbca")):
            browser.value(f"document.querySelector('[data-order={order}]').click()")
            assert texts(browser, prompts) == list(expected)
            assert texts(browser, "#sampleorder [aria-pressed=true]") == [
                {"worst": "Worst first", "prompt": "By prompt", "best": "Best first"}[order]
            ]
        last = ".cards:last-child .sample:last-child"
        assert texts(browser, f"{last} > small") == ["prompt", "response", "reference answer"]
        assert texts(browser, f"{last} > pre") == ["a", "right a"]
        assert texts(browser, f"{last} .more > summary") == ["more: level"] and count(browser, ".more pre") == 0
        assert texts(browser, ".long b") == [f"all {len(LONG):,} characters"]
        assert count(browser, ".long pre") == 0 and count(browser, ".long .beginning") == 1
        browser.value("document.querySelector('.long > summary').click()")
        assert count(browser, ".long pre") == 1 and count(browser, ".long .beginning") == 0
        assert texts(browser, ".long pre") == [LONG]
        assert browser.errors == [] and browser.value("document.documentElement.scrollWidth - innerWidth") == 0


def test_axes_scores_groups_and_keys_of_a_run(tmp_path: Path) -> None:
    """By tokens, a histogram, all responses to a prompt together, and keys that differ from the defaults."""
    run = make_run(tmp_path / "run", num_iterations=1)
    (run / "config.yaml").write_text(ExperimentConfig.from_yaml(ROOT / "configs" / "quickstart.yaml").to_yaml())
    rows = ["iteration,actor/lr,actor/loss,time/iteration_seconds,train/tokens_per_sec"]
    rows += [f"{i},0.001,{1 / i},10.0,{100 * i}" for i in range(1, 5)]  # 1000, 3000, 6000, 10000 tokens
    (run / "metrics.csv").write_text("\n".join(rows) + "\n")
    samples = [
        {"iteration": i, "kind": "train", "prompt": "p", "response": f"r{k}", "score": k}
        for i in (1, 4)
        for k in (0, 1, 2)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert main([str(run), "--output", str(tmp_path / "report.html")]) == 0
    program()
    with Browser(width=1280, height=900, dark=False) as browser:
        browser.open(tmp_path / "report.html")
        assert "Learning rate of the actor" in texts(browser, ".charts h3")
        loss = "figure[data-metric='actor/loss']"
        before = browser.value(f'document.querySelector("{loss} path.k0").getAttribute("d")')
        enter(browser, "axis", "value", "tokens", "change")
        after = browser.value(f'document.querySelector("{loss} path.k0").getAttribute("d")')
        places = [[float(point.split()[0]) for point in d[1:].split("L")] for d in (before, after)]
        shares = [[(x - own[0]) / (own[-1] - own[0]) for x in own] for own in places]
        assert shares[0] == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=0.01)
        assert shares[1] == pytest.approx([0, 2 / 9, 5 / 9, 1], abs=0.01)
        assert texts(browser, f"{loss} .unit") == ["tokens"]
        assert browser.value("Math.round(1e6 * (axis = 'hours', placeOf(RUNS[0], 2.5)))") == 6944  # 25 s
        assert texts(browser, "#histogram .keys b") == ["iterations 1 to 1", "iterations 4 to 4"]
        heights = "[...document.querySelectorAll('#histogram rect')].map(e => Number(e.getAttribute('height')) > 0)"
        assert browser.value(heights).count(True) == 6
        assert texts(browser, ".group .score") == ["3 responses, mean score 1"]
        assert texts(browser, ".group pre") == ["p", "r2", "r1", "r0"]
        [label] = texts(browser, "#config label:not([hidden])")
        shown = count(browser, "#config tr:has(td)")
        assert label.startswith(f" only what differs from the defaults ({shown} of ") and shown < 40
        enter(browser, "own", "checked", False, "change")
        assert count(browser, "#config tr:has(td)") > 100
        assert browser.errors == [] and browser.value("document.documentElement.scrollWidth - innerWidth") == 0


@pytest.mark.thorough
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
    assert capsys.readouterr().out == f"{tmp_path.resolve()}/report.html: 1 run; open it in a browser\n"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
