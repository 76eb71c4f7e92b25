"""What the page says of a run before all curves: algorithm, model, data, state, duration, scores, command, versions.

Pure: of what `hybridflow.reporting.runs` has read.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from hybridflow.config.best_metric import lower_is_better
from hybridflow.reporting.metric_titles import metric_title
from hybridflow.reporting.runs import Curve, RunRecord

ALGORITHMS = {  # algorithm.name of the config
    "ppo": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "rloo": "RLOO",
    "opo": "OPO",
    "maxrl": "MaxRL",
    "remax": "ReMax",
    "reinforce": "REINFORCE",
    "distill": "on-policy distillation",
    "sft": "supervised fine-tuning",
    "reward_model": "reward model",
    "dpo": "DPO",
    "kto": "KTO",
}
EVALUATED = ("eval/accuracy", "eval/reward_accuracy", "eval/loss", "eval/score_mean")
OF_SET = re.compile(r"eval/[^/]+/accuracy")
TRAINED = ("reward/score_mean", "actor/loss", "reward_model/loss")
MOST_SCORES = 3
BEST_METRIC, BEST_IS = "checkpoint.best_metric", "checkpoint.best_is"
MINUTE, HOUR, DAY = 60, 3600, 86400


def head(run: RunRecord) -> dict[str, Any]:
    """`facts`: (name, values) in the order of the page; each value is a line. Empty facts are left out."""
    kind, text = state(run)
    facts = {
        "algorithm": _algorithm(run.config),
        "model": _values(run.config, r"(actor|reward_model)\.model"),
        "data": _data(run.config),
        "reward": _values(run.config, r"reward\.(models\.\d+\.model|functions\.\d+\.function)"),
        "duration": _duration(run),
        "command": list(dict.fromkeys(start.command for start in run.starts)),
        "versions": _versions(run),
    }
    return {
        "state": {"kind": kind, "text": text},
        "facts": [[name, lines] for name, lines in facts.items() if lines],
        "scores": [_score(run, metric) for metric in scored_metrics(run)],
    }


# ------------------------------------------------------------------------------------------------ state and time


def state(run: RunRecord) -> tuple[str, str]:
    """(finished, stopped, failed, running or unknown; at which iteration, and why)."""
    done, total = run.iterations[-1], run.config.get("num_iterations", "null")
    at = f"iteration {done:,}" if total == "null" else f"iteration {done:,} of {int(total):,}"
    if not run.starts:
        return "unknown", f"{at}; the run has not recorded its start and end"
    last = run.starts[-1]
    match last.how:
        case None:
            return _without_end(run, at)
        case "finished":
            return "finished", at
        case "lost":
            return "failed", f"after {at}: the process has ended without saying why"
        case "stopped":
            return "stopped", f"{last.why}; {at} is done"
        case "failed":
            return "failed", f"after {at}: {last.why}"


def _without_end(run: RunRecord, at: str) -> tuple[str, str]:
    if run.has_hang_report:
        return "failed", f"after {at}: logs/hang_report.txt says which rank was stuck or gone"
    if run.is_running:
        return "running", f"{at} is done"
    if run.is_running is None:
        ago = span(run.read_at - run.last_sign)
        return "unknown", f"{at} was written {ago} before this page; this page cannot show whether the run continues"
    return "failed", f"after {at}: the process has ended without saying why"


def _duration(run: RunRecord) -> list[str]:
    if not run.starts:
        return []
    last = run.starts[-1]
    until = run.read_at if run.is_running and not run.has_hang_report else run.last_sign
    ends = [until if start.ended is None else start.ended for start in run.starts]
    total = sum(max(0.0, end - start.began) for start, end in zip(run.starts, ends, strict=True))
    starts = f" in {len(run.starts)} starts" if len(run.starts) > 1 else ""
    first, end = utc_time(run.starts[0].began), "" if last.ended is None else utc_time(last.ended)
    end = end.removeprefix(first[: len("2026-01-31 ")])  # the day stands once
    return [f"{span(total)}{starts}", f"from {first}{end and f' to {end}'} UTC"]


def span(seconds: float) -> str:
    """42 s, 4 min 12 s, 2 h 3 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    for unit, name, lower, lower_name in ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min"), (MINUTE, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // lower} {lower_name}"
    return f"{whole} s"


def utc_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


# ------------------------------------------------------------------------------------------------ scores


def scored_metrics(run: RunRecord) -> list[str]:
    """checkpoint.best_metric, what evaluations measure, and the score or loss of training: as far as the run has it."""
    best = _value(run.config, BEST_METRIC)
    trained = next((metric for metric in TRAINED if run.curves.get(metric)), None)
    of_sets = [metric for metric in run.curves if OF_SET.fullmatch(metric)]
    wanted = [*EVALUATED[:3], *of_sets, best, trained, *EVALUATED[3:]]
    return list(dict.fromkeys(metric for metric in wanted if metric and run.curves.get(metric)))[:MOST_SCORES]


def _score(run: RunRecord, metric: str) -> dict[str, Any]:
    """First, best and last value as texts. best_at is an iteration; None where no value is finite."""
    curve, title = run.curves[metric], metric_title(metric)
    best = best_of(curve, lowest=_lowest_is_best(run.config, metric))
    shown = ((value, _shown(value, title.unit)) for value in (curve[0][1], curve[-1][1]))
    [(_, first), (_, last)] = shown
    return {
        "metric": metric,
        "title": title.text,
        "first": first,
        "best": None if best is None else _shown(best[1], title.unit),
        "best_at": None if best is None else best[0],
        "last": last,
    }


def best_of(curve: Curve, *, lowest: bool) -> tuple[int, float] | None:
    """The first (iteration, value) of the best finite value."""
    finite = [point for point in curve if math.isfinite(point[1])]
    if not finite:
        return None
    return min(finite, key=lambda point: point[1] if lowest else -point[1])


def _lowest_is_best(config: Mapping[str, str], metric: str) -> bool:
    best = _value(config, BEST_IS) if metric == _value(config, BEST_METRIC) else None
    return best == "lowest" if best in ("highest", "lowest") else lower_is_better(metric)


def _shown(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.1%}" if unit == "share" else f"{value:.4g}{unit and f' {unit}'}"


# ------------------------------------------------------------------------------------------------ config


def _value(config: Mapping[str, str], key: str) -> Any:
    return json.loads(config[key]) if key in config else None


def _values(config: Mapping[str, str], pattern: str) -> list[str]:
    """Of the keys that are a pattern's, those that are texts; each once."""
    found = (json.loads(value) for key, value in config.items() if re.fullmatch(pattern, key))
    return list(dict.fromkeys(value for value in found if isinstance(value, str)))


def _algorithm(config: Mapping[str, str]) -> list[str]:
    name = _value(config, "algorithm.name")
    if name == "custom":
        return [f"custom: {_value(config, 'algorithm.flow')}"]
    return [ALGORITHMS.get(name, str(name))] if name else []


def _data(config: Mapping[str, str]) -> list[str]:
    """What the run trains on, and what it is evaluated on."""
    lines = list(_sources(config, "data.train"))
    sets = {found[1]: None for key in config if (found := re.match(r"data\.heldout\.(\w[\w-]*)\.files", key))}
    named = [(f"held out, {name}", f"data.heldout.{name}.files") for name in sets]
    for title, key in [("held out", "data.heldout"), *named]:
        lines += [f"{title}: {source}" for source in _sources(config, key)]
    return lines


def _sources(config: Mapping[str, str], key: str) -> Iterator[str]:
    """Files and data sets of the Hub, whether they stand alone or in a list; and tasks of reasoning-gym."""
    for name, value in config.items():
        if re.fullmatch(rf"{re.escape(key)}\.reasoning_gym\.\d+\.name", name):
            yield f"reasoning-gym, {json.loads(value)}"
        if found := re.fullmatch(rf"({re.escape(key)}(?:\.\d+)?)(?:\.(path|hub))?", name):
            given = json.loads(value)
            split = _value(config, f"{found[1]}.split") if found[2] == "hub" else None
            for source in given if isinstance(given, list) else [given]:
                if isinstance(source, str):
                    yield source if split is None else f"{source}, {split}"


def _versions(run: RunRecord) -> list[str]:
    """Of the last start."""
    if not run.starts:
        return []
    last = run.starts[-1]
    commit = [] if last.commit is None else [f"commit {last.commit}"]
    return [", ".join([*(f"{package} {version}" for package, version in last.versions.items()), *commit])]
