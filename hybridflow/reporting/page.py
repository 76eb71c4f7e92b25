"""One HTML file of several runs: what `page.js` draws, as JSON, with the style and the script it needs, and no network.

What a user or a model has written is text and stays text: in the JSON `<`, `>` and `&` are escaped, so that no tag can
end the element it lies in, and the script puts it on the page as text nodes. The page's own policy lets no other script
run than this one, whatever else should fail, and nothing be loaded.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate
from typing import Any

from hybridflow import __version__
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.recording.run_dir import RunLayout
from hybridflow.reporting.head import head, utc_time
from hybridflow.reporting.metric_titles import metric_title
from hybridflow.reporting.runs import Curve, RunRecord, Samples
from hybridflow.reporting.shown_samples import shown_samples

SAMPLED_ITERATIONS = 100  # of a run, that the page has samples of
FIRST_AREAS = (
    "eval",
    "reward",
    "actor",
    "critic",
    "kl",
    "rollout",
    "sampling",
    "train",
    "speed",
    "time",
    "reshard",
    "memory",
)


def page(runs: Sequence[RunRecord]) -> str:
    title = "hybridflow: " + ", ".join(run.label for run in runs)
    style, script = _resource("page.css"), _resource("page.js")
    policy = f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    body = _resource("page.html")
    parts = {"TITLE": escape(title), "POLICY": escape(policy), "VERSION": escape(__version__)}
    parts["MADE"] = utc_time(max(run.read_at for run in runs)) + " UTC"
    parts |= {"STYLE": style, "DATA": embedded(data(runs)), "SCRIPT": script}
    pieces = body.split("@@")  # text @@NAME@@ text ...: what is put in is not looked at again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _resource(name: str) -> str:
    return files("hybridflow.reporting").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(tree: Any) -> str:
    """JSON that may stand in a script element whatever the strings hold."""
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # in JSON they stand in strings alone
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# ------------------------------------------------------------------------------------------------ what is drawn


def data(runs: Sequence[RunRecord]) -> dict[str, Any]:
    names = dict.fromkeys(name for run in runs for name, curve in run.curves.items() if curve)
    ordered = sorted(names, key=_place)
    alike = {name for name in ordered if is_flat([run.curves[name] for run in runs if name in run.curves])}
    flat = {name for name in alike if not name.endswith("/lr")}  # a constant learning rate is drawn, too
    return {
        "metrics": [_titled(name) for name in ordered if name not in flat],
        "flat": [_titled(name) for name in ordered if name in flat],
        "runs": [_run(run) for run in runs],
    }


def is_flat(curves: Sequence[Curve]) -> bool:
    """Whether each curve is one finite value all along. A curve of one point alone says nothing yet."""
    values = [{value for _, value in curve} for curve in curves if curve]
    return all(len(each) == 1 and math.isfinite(*each) for each in values) and any(len(curve) > 1 for curve in curves)


def _titled(metric: str) -> dict[str, str]:
    title = metric_title(metric)
    return {"name": metric, "title": title.text, "unit": title.unit}


def _place(metric: str) -> tuple[int, str]:
    """Areas that are looked at first come first; the metrics of an area as they came."""
    area = metric.partition("/")[0]
    return (FIRST_AREAS.index(area), "") if area in FIRST_AREAS else (len(FIRST_AREAS), area)


def _run(run: RunRecord) -> dict[str, Any]:
    curves = {name: points(curve) for name, curve in run.curves.items()}
    per = max(curve["per"] for curve in curves.values()) if curves else 1
    return {
        "label": run.label,
        "head": head(run),
        "path": str(run.path),
        "first": run.iterations[0],
        "last": run.iterations[-1],
        "count": len(run.iterations),
        "per": per,
        "notes": list(run.notes),
        "curves": curves,
        "ends": {name: [_text(curve[0][1]), _text(curve[-1][1])] for name, curve in run.curves.items()},
        "axes": axes(run.curves),
        "experts": [_of_layer(layer, curve) for layer, curve in run.experts_load.items()],
        "config": dict(run.config),
        "own": None if run.own_keys is None else sorted(run.own_keys),
        "layout": None if run.layout is None else _layout(run.layout),
        "samples": shown_samples(run.samples, run.config),
        "histogram": score_histogram(run.samples),
    }


def _text(value: float) -> str:
    return f"{value:.4g}"


def _of_layer(layer: int, curve: Curve) -> dict[str, Any]:
    """The load of a layer's experts, as texts: of the first and the last iteration, the mean and the largest of all."""
    values = [value for _, value in curve]
    found = {"first": values[0], "last": values[-1], "mean": math.fsum(values) / len(values), "largest": max(values)}
    return {"layer": layer, **{name: _text(value) for name, value in found.items()}}


def _layout(layout: RunLayout) -> dict[str, Any]:
    roles = [_role(name, role) for name, role in layout.roles.items()]
    engine = [_engine(layout.rollout)] if layout.rollout is not None else []
    return {"world": layout.world_size, "roles": [*roles, *engine]}


def _role(name: str, layout: Layout) -> dict[str, Any]:
    names = [f"dp {dp}" + f", cp {cp}" * (layout.cp > 1) for dp in range(layout.dp) for cp in range(layout.cp)]
    chunks = f", {layout.vpp} model chunks a stage" if layout.vpp > 1 else ""
    experts = f", ep {layout.ep}" if layout.ep > 1 else ""
    context = f", cp {layout.cp}" if layout.cp > 1 else ""
    sizes = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}{context}{experts}{chunks}"
    return {"name": name, "sizes": sizes, "replicas": _by_stage(layout.groups("tp", "pp"), layout.tp), "names": names}


def _engine(layout: RolloutLayout) -> dict[str, Any]:
    names = [f"replica {number}" for number in range(len(layout.replicas))]
    sizes = f"tp {layout.tp}, pp {layout.pp}, {len(names)} replica{'s' * (len(names) > 1)}"
    return {"name": "rollout", "sizes": sizes, "replicas": _by_stage(layout.replicas, layout.tp), "names": names}


def _by_stage(replicas: Sequence[tuple[int, ...]], tp: int) -> list[list[list[int]]]:
    """[replica][pp][tp] is a rank."""
    return [[list(ranks[i : i + tp]) for i in range(0, len(ranks), tp)] for ranks in replicas]


SECONDS, RATE, SAVING = "time/iteration_seconds", "train/tokens_per_sec", "time/save_seconds"


def axes(curves: Mapping[str, Curve]) -> dict[str, dict[str, list[Any]]]:
    """By axis x, iterations, and y, what there was at the end of each: on straight lines in between.

    Tokens are those of prompts and responses that the run has trained on. Hours are those of iterations and saves,
    without starts and evaluations. An axis whose metrics the run lacks is left out.
    """
    seconds, rate, saving = (dict(curves.get(name, ())) for name in (SECONDS, RATE, SAVING))
    if not seconds:
        return {}
    hours = {i: (value + saving.get(i, 0.0)) / 3600 for i, value in seconds.items()}
    found = {"hours": _so_far(hours)}
    return found | ({"tokens": _so_far({i: seconds[i] * rate[i] for i in seconds if i in rate})} if rate else {})


def _so_far(of_iterations: Mapping[int, float]) -> dict[str, list[Any]]:
    x, y = [min(of_iterations) - 1, *of_iterations], list(accumulate(of_iterations.values(), initial=0.0))
    step = -(-len(x) // MOST)
    kept = sorted({*range(0, len(x), step), len(x) - 1})
    return {"x": [x[i] for i in kept], "y": [float(f"{y[i]:.7g}") for i in kept]}


BINS = 16


def score_histogram(samples: Samples) -> dict[str, Any] | None:
    """Counts of training samples with a finite score: `first` and `last` of the two halves of the iterations.

    `edges` are those of bins of one width, BINS + 1; of one value alone two. `iterations`: the first and last of each
    half. None where no sample has such a score.
    """
    scores = {i: [float(x) for row in rows if _counts(x := row.get("score"), row)] for i, rows in _ordered(samples)}
    numbers = [i for i, own in scores.items() if own]
    if not numbers:
        return None
    half = (len(numbers) + 1) // 2
    low, high = (f(x for own in scores.values() for x in own) for f in (min, max))
    bins = BINS if low < high else 1
    width = (high - low) / bins
    halves: list[list[int]] = []
    for some in (numbers[:half], numbers[half:]):
        counts = [0] * bins
        for value in (x for i in some for x in scores[i]):
            counts[min(int((value - low) / width), bins - 1) if width else 0] += 1
        halves.append(counts)
    return {
        "edges": [float(f"{low + k * width:.6g}") for k in range(bins + 1)],
        "first": halves[0],
        "last": halves[1],
        "iterations": [[some[0], some[-1]] for some in (numbers[:half], numbers[half:]) if some],
    }


def _ordered(samples: Samples) -> list[tuple[int, Any]]:
    return sorted(samples.by_iteration.items())


def _counts(score: object, row: dict[str, Any]) -> bool:
    number = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
    return number and row.get("kind") != "heldout"


MOST = 400  # points of a curve: no screen shows more side by side in a chart
DIGITS = 6


def points(curve: Curve, most: int = MOST) -> dict[str, Any]:
    """x and y, lists of one length; y is None where a value is not finite.

    Of a longer curve each point stands for `per` values: x is the first of their iterations and `end` the last, y the
    mean of those that are finite, `low` and `high` the least and the largest.
    """
    per = -(-len(curve) // most)
    if per <= 1:
        return {"per": 1, "x": [x for x, _ in curve], "y": [_number(y) for _, y in curve]}
    parts = [curve[i : i + per] for i in range(0, len(curve), per)]
    values = [[y for _, y in part if math.isfinite(y)] for part in parts]
    return {
        "per": per,
        "x": [part[0][0] for part in parts],
        "end": [part[-1][0] for part in parts],
        "y": [_number(_mean(part)) for part in values],
        "low": [_number(min(part, default=math.nan)) for part in values],
        "high": [_number(max(part, default=math.nan)) for part in values],
        "lost": [len(part) - len(kept) for part, kept in zip(parts, values, strict=True)],
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values) if values else math.nan


def _number(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
