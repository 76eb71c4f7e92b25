"""The picture of an iteration: rows and bars by hand, and that no text leaves its place, as a browser lays it out."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hybridflow.automap.gantt import BAR, LEFT, RIGHT, WIDTH, gantt
from hybridflow.automap.timeline import Span
from tests.browser import Browser

SVG = "{http://www.w3.org/2000/svg}"
SPANS = (
    Span("generate", "engine", (0, 1), 0.0, 4.0, "memory"),
    Span("reward", "reward.models.0", (2,), 4.0, 1.0, "products"),
    Span("log_probs", "actor", (0, 1), 4.0, 2.0, "products"),
    Span("exchange", "", (0, 1, 2), 6.0, 1e-6, "links"),
    Span("critic_update", "critic", (2,), 6.0, 0.5, "products"),
    Span("actor_update", "actor", (0, 1), 6.0, 2.0, "products"),
)


def bars(text: str) -> list[tuple[float, float, float]]:
    """(x, y, width) of every bar of a span."""
    root = ElementTree.fromstring(text)
    found = [each for each in root.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    return [(float(each.attrib["x"]), float(each.attrib["y"]), float(each.attrib["width"])) for each in found]


def test_ranks_alike_share_a_row_and_a_bar_is_as_long_as_its_span() -> None:
    text = gantt(SPANS, 3, title="a <run> & its iteration")
    found = bars(text)
    scale = (WIDTH - LEFT - RIGHT) / 8.0
    first, second = sorted({y for _, y, _ in found})
    assert [(x, width) for x, y, width in found if y == first] == [
        (pytest.approx(LEFT + begin * scale, abs=0.06), pytest.approx(seconds * scale, abs=0.06))
        for begin, seconds in ((0, 4), (4, 2), (6, 2))
    ]
    assert len([y for _, y, _ in found if y == second]) == 2  # the exchange is too short to be seen
    assert "ranks 0-1" in text and ">rank 2<" in text and "a &lt;run&gt; &amp; its iteration" in text


def test_many_ranks_are_one_row_where_they_do_the_same() -> None:
    spans = (Span("generate", "engine", tuple(range(0, 512)), 0.0, 1.0, "memory"),)
    assert len(bars(gantt(spans, 1024, title=""))) == 1


OVERLAPS = """
(() => {
  const texts = [...document.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  const bars = [...document.querySelectorAll('rect')].filter(r => r.querySelector('title'));
  const out = [];
  texts.forEach(([one, a], i) => texts.slice(i + 1).forEach(([other, b]) => {
    if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) out.push(one + ' / ' + other);
  }));
  texts.forEach(([text, box]) => { if (box.left < 0 || box.right > 1080) out.push(text + ' leaves the picture'); });
  document.querySelectorAll('text[pointer-events]').forEach(t => {
    const box = t.getBoundingClientRect(), bar = t.previousElementSibling.getBoundingClientRect();
    if (box.left < bar.left || box.right > bar.right) out.push(t.textContent + ' leaves its bar');
  });
  return JSON.stringify(out);
})()
"""


def test_no_text_is_over_another_or_outside_its_bar(tmp_path: Path) -> None:
    file = tmp_path / "iteration.svg"
    crowded = [
        Span(phase, role, ranks, begin, 0.05 * (i + 1), "products")
        for i, (phase, role) in enumerate((s.phase, s.role) for s in SPANS)
        for ranks, begin in (((0,), i * 0.4), ((1, 3, 5, 7, 9, 11, 13, 15, 17, 19), 3.0 + i * 0.35))
    ]
    with Browser(width=1080, height=400) as browser:
        for spans, world_size in ((SPANS, 3), (crowded, 20)):
            file.write_text(gantt(spans, world_size, title="a name that is long " * 12))
            browser.open(file)
            assert browser.value(OVERLAPS) == "[]"


def test_a_bar_is_labelled_only_where_the_label_goes_in() -> None:
    text = gantt(SPANS, 3, title="")
    labels = re.findall(r'text-anchor="middle" fill="#ffffff"[^>]*>([^<]*)<', text)
    assert labels == ["generate 4 s", "log probs 2 s", "actor update 2 s", "reward 1 s", "0.5"]
    assert BAR > 12
