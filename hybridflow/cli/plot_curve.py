"""Draw learning curves as an SVG, from the metrics.csv of one or more runs:

    python -m tools.plot_curve runs/curve.svg runs/quickstart runs/quickstart_seed2 [--metric eval/accuracy]

Needs no plotting library.
"""

import csv
import itertools
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from hybridflow.cli.command import argument_parser, print_error

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 360, 56, 44, 36
FEW, BESIDE = 6, 220  # curves whose names fit in the picture; room for those of more
LINE, CHARACTER, MARGIN = 16, 7, 8  # the height of a name, the width of a letter at most, around all of them
COLORS = (  # as distinct as fourteen colours can be for eyes that see red and green alike
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b"),
    *("#e377c2", "#7f7f7f", "#bcbd22", "#000000", "#aa8800", "#005f73", "#7cb518"),
)
Curve = list[tuple[float, float]]


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("tools.plot_curve", __doc__)
    parser.add_argument("target", type=Path, metavar="SVG", help="the file to write")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs")
    parser.add_argument("--metric", default="eval/accuracy", help="a column of metrics.csv (default eval/accuracy)")
    options = parser.parse_args(arguments)
    curves = {}
    for run in options.runs:
        try:
            curves[run.name] = read_curve(run / "metrics.csv", options.metric)
        except (OSError, KeyError, ValueError) as error:
            print_error(f"{run / 'metrics.csv'}: no curve of {options.metric}: {error}", "tools.plot_curve")
            return 1
    options.target.parent.mkdir(parents=True, exist_ok=True)
    options.target.write_text(draw(curves, options.metric), encoding="utf-8")
    print(f"{options.target}: {options.metric} of {', '.join(curves)}; open it in a browser")
    return 0


def read_curve(path: Path, metric: str) -> Curve:
    """(iteration, value) wherever the metric was measured."""
    with path.open(newline="", encoding="utf-8") as file:
        curve = [(float(row["iteration"]), float(row[metric])) for row in csv.DictReader(file) if row[metric]]
    if not curve:
        raise ValueError("the column is empty")
    return curve


def draw(curves: dict[str, Curve], metric: str) -> str:
    points = [point for curve in curves.values() for point in curve]
    x_range = (min(x for x, _ in points), max(max(x for x, _ in points), min(x for x, _ in points) + 1))
    low, high = min(y for _, y in points), max(y for _, y in points)
    y_range = (0.0, 1.0) if 0 <= low and high <= 1 else (low, high if high > low else low + 1)
    lines = [[(place(x, x_range, *X), place(y, y_range, *Y)) for x, y in curve] for curve in curves.values()]
    labels = [f"{name}: {curve[0][1]:.2f} to {curve[-1][1]:.2f}" for name, curve in curves.items()]
    corner = free_corner(labels, lines) if len(curves) <= FEW else None
    width = WIDTH + (BESIDE if corner is None else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(metric)} by iteration</text>',
        *axes(x_range, y_range),
    ]
    for number, (label, line) in enumerate(zip(labels, lines, strict=True)):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text {legend(number, len(curves), corner)} fill="{color}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def free_corner(labels: list[str], lines: list[Curve]) -> tuple[str, str] | None:
    """Where the names cross no curve: at the bottom right, as curves rise, or else the first other one."""
    width, height = CHARACTER * max(map(len, labels)) + MARGIN, LINE * len(labels) + MARGIN
    for low, side in (("bottom", "right"), ("top", "left"), ("bottom", "left"), ("top", "right")):
        left = X[1] - width if side == "right" else X[0]
        top = Y[0] - height if low == "bottom" else Y[1]
        if not any(left <= x <= left + width and top <= y <= top + height for line in lines for x, y in between(line)):
            return low, side
    return None


def between(line: Curve, steps: int = 50) -> Iterator[tuple[float, float]]:
    """The points of a line and those between them."""
    yield line[0]
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        for step in range(1, steps + 1):
            yield x0 + step / steps * (x1 - x0), y0 + step / steps * (y1 - y0)


def legend(number: int, count: int, corner: tuple[str, str] | None) -> str:
    """Where the name of a curve stands: in a corner, one below the other; without one beside the picture."""
    if corner is None:
        return f'x="{X[1] + 16}" y="{TOP + 8 + 20 * number}"'
    low, side = corner
    y = Y[0] - MARGIN - LINE * (count - 1 - number) if low == "bottom" else Y[1] + LINE * (number + 1)
    across = f'x="{X[1] - MARGIN}"' if side == "right" else f'x="{X[0] + MARGIN}"'
    return f'{across} y="{y}"' + (' text-anchor="end"' if side == "right" else "")


X = (LEFT, WIDTH - 20)
Y = (HEIGHT - BOTTOM, TOP)


def place(value: float, of: tuple[float, float], first: float, last: float) -> float:
    """Where a value lies between two edges of the picture."""
    return first + (value - of[0]) / (of[1] - of[0]) * (last - first)


def axes(x_range: tuple[float, float], y_range: tuple[float, float]) -> list[str]:
    parts = []
    for i in range(6):
        x = x_range[0] + i / 5 * (x_range[1] - x_range[0])
        y = y_range[0] + i / 5 * (y_range[1] - y_range[0])
        px, py = place(x, x_range, *X), place(y, y_range, *Y)
        parts.append(f'<line x1="{X[0]}" y1="{py:.1f}" x2="{X[1]}" y2="{py:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{y:.2g}</text>')
        parts.append(f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:.0f}</text>')
    return parts


if __name__ == "__main__":
    sys.exit(main())
