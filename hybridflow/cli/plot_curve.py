"""Draw learning curves as an SVG, from the metrics.csv of one or more runs:

    python -m tools.plot_curve docs/learning_curve.svg runs/quickstart runs/quickstart_seed2 [--metric eval/accuracy]

Needs no plotting library.
"""

import argparse
import csv
import sys
from html import escape
from pathlib import Path

from hybridflow.cli.command import print_error, program

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 360, 56, 44, 36
FEW, BESIDE = 6, 220  # curves whose names fit in the picture; room for those of more
COLORS = (  # told apart by eyes that see red and green alike, as far as fourteen can be
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b"),
    *("#e377c2", "#7f7f7f", "#bcbd22", "#000000", "#aa8800", "#005f73", "#7cb518"),
)
Curve = list[tuple[float, float]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program("tools.plot_curve"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    options.target.write_text(draw(curves, options.metric))
    return 0


def read_curve(path: Path, metric: str) -> Curve:
    """(iteration, value) wherever the metric was measured."""
    with path.open(newline="") as file:
        curve = [(float(row["iteration"]), float(row[metric])) for row in csv.DictReader(file) if row[metric]]
    if not curve:
        raise ValueError("the column is empty")
    return curve


def draw(curves: dict[str, Curve], metric: str) -> str:
    points = [point for curve in curves.values() for point in curve]
    x_range = (min(x for x, _ in points), max(max(x for x, _ in points), min(x for x, _ in points) + 1))
    low, high = min(y for _, y in points), max(y for _, y in points)
    y_range = (0.0, 1.0) if 0 <= low and high <= 1 else (low, high if high > low else low + 1)
    width = WIDTH + (BESIDE if len(curves) > FEW else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(metric)} by iteration</text>',
        *axes(x_range, y_range),
    ]
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{place(x, x_range, *X):.1f},{place(y, y_range, *Y):.1f}" for x, y in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        label = f"{name}: {curve[0][1]:.2f} to {curve[-1][1]:.2f}"
        parts.append(f'<text {legend(number, len(curves))} fill="{color}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def legend(number: int, count: int) -> str:
    """Where the name of a curve stands: few at the bottom right, as curves rise; many beside the picture."""
    if count > FEW:
        return f'x="{X[1] + 16}" y="{TOP + 8 + 20 * number}"'
    return f'x="{X[1] - 8}" y="{HEIGHT - BOTTOM - 8 - 16 * (count - 1 - number)}" text-anchor="end"'


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
