"""What metrics are called for people: all that the package writes have a title of their own."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.config.best_metric import AREAS
from hybridflow.reporting.metric_titles import TITLES, MetricTitle, known_title, metric_title

PACKAGE = Path(__file__).resolve().parents[2] / "hybridflow"
WRITERS = ("recording/iteration.py", "recording/recorder.py", "trainers/loop.py", "rewards/scorer.py")
WRITERS += ("data/row_notes.py", "flows/*.py", "recording/costs.py", "roles/generator.py")
WRITERS += ("recording/engine_report.py",)
METRIC = re.compile(rf"({'|'.join(AREAS)})/[\w/]+")
STEMS = {"sampling/x", "eval/x"}  # of other literals the first part
REPORTED = ("loss", "grad_norm", "entropy", "approx_kl", "clip_fraction", "clip_fraction_low", "clip_fraction_high")
REPORTED += ("weights_out_of_bounds", "lr", "reference_point", "reward_accuracy", "chosen_reward_mean")


def literals(file: Path) -> Iterator[str]:
    """Texts of a module, with x for what an f-string puts in."""
    tree = ast.parse(file.read_text())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def test_every_metric_of_the_package_has_a_title() -> None:
    files = [file for pattern in WRITERS for file in sorted(PACKAGE.glob(pattern))]
    written = {text for file in files for text in literals(file) if METRIC.fullmatch(text)} - STEMS
    assert {"rollout/gen_kl", "reward/part_x_mean", "reshard/bytes_sent", "eval/failed_rows"} < written
    assert {"rollout/staleness_x_log_prob_diff", "time/engines_wait_seconds"} < written
    written |= {f"actor/{name}" for name in REPORTED}
    lengths = ("prompts", "response_length_mean", "truncated_fraction", "score_mean")
    written |= {f"sampling/{bucket}/{name}" for bucket in ("up_to_64", "longer") for name in lengths}
    # one name of a timed phase is that of no metric, and a part of a score is called as its function calls it
    assert {name for name in written if known_title(name) is None} - {
        "reward/x",
        "environment/x",
        "time/x_seconds",
    } == set()


def test_every_timed_phase_has_a_title() -> None:
    calls = r"(?:watch|_watch)\.phase\(\"(\w+)\"\)"
    phases = {name for file in PACKAGE.rglob("*.py") for name in re.findall(calls, file.read_text())}
    assert {"generate", "reward", "actor_update", "log_probs"} <= phases - {"rollout"}
    assert {name for name in phases if known_title(f"time/{name}_seconds") is None} == set()


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("rollout/truncated_fraction", ("Responses cut at the length limit", "share")),
        ("sampling/up_to_64/score_mean", ("Mean score, prompts of up to 64 tokens", "")),
        ("reward/part_model_0_mean", ("Mean score of model 0, before its weight", "")),
        ("rollout/staleness_1_fraction", ("Response tokens of age 1", "share")),
        ("reward/my_rule/form", ("Mean of my rule: form", "")),
        ("reward_model/lr", ("Learning rate of the reward model", "")),
        ("actor/my_report", ("Actor: my report", "")),
        ("mine/held_tokens_per_sec", ("Mine: held tokens per sec", "tokens/s")),
        ("plain", ("Plain", "")),
        ("reward/<b>x</b>", ("Reward: <b>x</b>", "")),
    ],
)
def test_titles(metric: str, title: tuple[str, str]) -> None:
    assert metric_title(metric) == MetricTitle(*title)


def test_no_two_metrics_of_one_area_have_one_title() -> None:
    named = [(metric.partition("/")[0], *title) for metric, title in TITLES.items()]
    assert len(set(named)) == len(named)
