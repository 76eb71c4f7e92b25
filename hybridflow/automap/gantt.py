"""Who is where, and when: one iteration as a picture, a row for ranks that do the same. Pure: text of an SVG file."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hybridflow.automap.timeline import Span
from hybridflow.parallel.ranks import shown

WIDTH, LEFT, RIGHT, TOP = 1080, 130, 20, 86  # pixels
ROW, GAP, BAR = 46, 10, 30
CHARACTER = 6.7  # pixels of one at 12 px, taken wide; of labels in bars, at 11 px, less
LABEL_CHARACTER = 6.1
LEAST_PIXELS = 1.5  # of a span that is drawn
COLOURS = {  # of roles; dark enough for white letters
    "actor": "#1f5fa8",
    "critic": "#9a4a12",
    "reference": "#4d7326",
    "engine": "#6a3d9a",
    "reward": "#9b2158",
    "": "#767676",
}
NAMES = {"": "all ranks together", "reward": "reward models"}


@dataclass(frozen=True)
class _Row:
    ranks: tuple[int, ...]
    spans: tuple[Span, ...]


def gantt(spans: Sequence[Span], world_size: int, *, title: str) -> str:
    """An SVG file. Spans too short to be seen are left out; a bar's tool tip has the numbers."""
    rows = _rows(spans, world_size)
    end = max(span.begin + span.seconds for span in spans)
    scale = (WIDTH - LEFT - RIGHT) / end
    height = TOP + len(rows) * (ROW + GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{GAP}" y="22" font-size="14" fill="#222222">{escape(_cut(title, WIDTH - 2 * GAP, 8.2))}</text>',
        *_legend(spans),
        *_axis(end, scale, height),
    ]
    for i, row in enumerate(rows):
        parts += _bars(row, TOP + i * (ROW + GAP), scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(spans: Sequence[Span], world_size: int) -> list[_Row]:
    """Ranks that do the same at the same times together, by first rank."""
    of_rank: list[list[int]] = [[] for _ in range(world_size)]
    drawn: dict[tuple[object, ...], int] = {}
    for span in spans:
        same = drawn.setdefault((span.phase, span.role, span.begin, span.seconds), len(drawn))
        for rank in span.ranks:
            of_rank[rank].append(same)
    first = {(span.phase, span.role, span.begin, span.seconds): span for span in reversed(spans)}
    by_number = {number: first[key] for key, number in drawn.items()}  # type: ignore[index]  # the same keys
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, numbers in enumerate(of_rank):
        alike.setdefault(tuple(numbers), []).append(rank)
    return [_Row(tuple(ranks), tuple(by_number[each] for each in numbers)) for numbers, ranks in alike.items()]


def _bars(row: _Row, top: float, scale: float) -> list[str]:
    label = ("rank " if len(row.ranks) == 1 else "ranks ") + shown(row.ranks)
    y = top + (ROW - BAR) / 2
    parts = [
        f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}" fill="#eeeeee"/>',
        f'<text x="{LEFT - 8}" y="{y + 19:.1f}" text-anchor="end" fill="#222222">'
        f"{escape(_cut(label, LEFT - 12, CHARACTER))}</text>",
    ]
    for span in row.spans:
        width = span.seconds * scale
        if width < LEAST_PIXELS:
            continue
        x = LEFT + span.begin * scale
        tip = f"{span.phase} {span.role}: {span.seconds:.3g} s from {span.begin:.3g} s on, bound by {span.bound}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[_role(span.role)]}" '
            f'stroke="#ffffff" stroke-width="0.7"><title>{escape(tip)}</title></rect>'
        )
        text = _fitting(span, width)
        if text:
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{y + 19:.1f}" text-anchor="middle" fill="#ffffff" font-size="11" '
                f'pointer-events="none">{escape(text)}</text>'
            )
    return parts


def _fitting(span: Span, width: float) -> str:
    """The longest label that goes into a bar; "" where none does."""
    name = span.phase.replace("_", " ")
    for text in (f"{name} {span.seconds:.3g} s", name, f"{span.seconds:.2g}"):
        if len(text) * LABEL_CHARACTER + 4 <= width:
            return text
    return ""


def _legend(spans: Sequence[Span]) -> list[str]:
    parts, x = [], float(GAP)
    there = {_role(span.role) for span in spans}
    for role, colour in COLOURS.items():
        if role in there:
            name = NAMES.get(role, role)
            parts.append(f'<rect x="{x:.1f}" y="36" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{x + 17:.1f}" y="46" fill="#222222">{name}</text>')
            x += 17 + len(name) * CHARACTER + 20
    parts.append(f'<rect x="{x:.1f}" y="36" width="12" height="12" fill="#eeeeee"/>')
    parts.append(f'<text x="{x + 17:.1f}" y="46" fill="#222222">waits</text>')
    return parts


def _axis(end: float, scale: float, height: float) -> list[str]:
    """Lines at round seconds, at most ten."""
    step = next(
        power * digit
        for power in (10.0**e for e in range(-9, 12))
        for digit in (1, 2, 5)
        if end / (power * digit) <= 10
    )
    parts = []
    for i in range(int(end / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        parts.append(f'<path d="M{x:.1f} {TOP - 10} V{height - 30}" stroke="#cccccc" stroke-width="1"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle" fill="#555555" font-size="11">{i * step:g} s</text>'
        )
    return parts


def _role(name: str) -> str:
    return "reward" if name.startswith("reward") else name if name in COLOURS else ""


def _cut(text: str, pixels: float, character: float) -> str:
    most = int(pixels / character)
    return text if len(text) <= most else text[: most - 3] + "..."
