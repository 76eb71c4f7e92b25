"""The page as text: what a user has written cannot end the element that it lies in."""

import base64
import hashlib
import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

from hybridflow.config import ExperimentConfig
from hybridflow.parallel.layout import Layout
from hybridflow.recording.run_dir import RunLayout
from hybridflow.recording.writers import ExpertsLoadWriter
from hybridflow.reporting.page import data, embedded, is_flat, page
from hybridflow.reporting.runs import read_runs
from tests.reporting.run_dirs import HOSTILE, make_run

ROOT = Path(__file__).resolve().parents[2]


def test_json_within_a_script_element() -> None:
    text = embedded({"</script>": ["<!-- & ]]>", "\u2028", "\udc00"]})
    assert text == r'{"\u003c/script\u003e":["\u003c!-- \u0026 ]]\u003e","\u2028","\udc00"]}'
    assert json.loads(text) == {"</script>": ["<!-- & ]]>", "\u2028", "\udc00"]}


def test_a_page_has_two_scripts_and_lets_no_other_run(tmp_path: Path) -> None:
    text = page(read_runs([make_run(tmp_path / "a <b>")], sampled_iterations=9))
    assert text.count("<script") == text.count("</script>") == 2 and text.count("<img") == 0
    assert "<title>hybridflow: a &lt;b&gt;</title>" in text
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script)]
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'"
    assert f'content="{policy.replace(chr(39), "&#x27;")}"' in text
    assert "http" not in re.sub(r'"http://www.w3.org/2000/svg"', "", style + script)
    tree = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert tree["runs"][0]["samples"]["iterations"][0]["rows"][0]["response"] == {"text": f"{HOSTILE} 2", "cut": 0}


def test_an_installed_package_has_what_the_page_is_made_of() -> None:
    data_files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "hybridflow"
    ]
    found = {path for pattern in data_files for path in (ROOT / "hybridflow").glob(pattern)}
    tracked = {path for path in (ROOT / "hybridflow").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in tracked if path.suffix != ".py"} == found


def test_metrics_that_are_looked_at_first_come_first_and_flat_ones_apart(tmp_path: Path) -> None:
    found = data(read_runs([make_run(tmp_path / "run")], sampled_iterations=9))
    assert [metric["name"] for metric in found["metrics"]] == [
        *("eval/accuracy", "reward/score_mean", "actor/loss", "time/update_seconds")
    ]
    assert found["metrics"][0] == {
        "name": "eval/accuracy",
        "title": "Held-out prompts answered right",
        "unit": "share",
    }
    assert [metric["name"] for metric in found["flat"]] == [
        *("reward/<b>x</b>", "time/rollout_seconds", "time/estimate_seconds", "time/generate_seconds")
    ]
    assert found["flat"][1]["unit"] == "s"


def test_a_learning_rate_is_drawn_though_it_is_constant(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_iterations=1)
    (path / "metrics.csv").write_text("iteration,actor/lr,actor/loss\n1,0.001,0.5\n2,0.001,0.5\n")
    found = data(read_runs([path], sampled_iterations=9))
    assert [metric["title"] for metric in found["metrics"]] == ["Learning rate of the actor"]
    assert [metric["name"] for metric in found["flat"]] == ["actor/loss"]


def test_keys_that_differ_from_the_defaults(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_iterations=1)
    assert data(read_runs([path], sampled_iterations=9))["runs"][0]["own"] is None, "this config is of no version"
    overrides = ["seed=7", "actor.optimizer.weight_decay=0.0", "metrics.num_samples=4"]
    (path / "config.yaml").write_text(ExperimentConfig.from_yaml(ROOT / "configs/quickstart.yaml", overrides).to_yaml())
    [run] = data(read_runs([path], sampled_iterations=9))["runs"]
    own = set(run["own"])
    assert {"name", "seed", "actor.model", "actor.optimizer.lr", "reward.models.0.model"} <= own <= set(run["config"])
    assert not own & {"metrics.num_samples", "checkpoint.keep_last", "actor.optimizer.betas", "nonfinite.action"}


def test_flat_is_one_finite_value_all_along() -> None:
    flat, other, alone, lost = [(1, 2.0), (2, 2.0)], [(1, 3.0), (2, 3.0)], [(1, 2.0)], [(1, math.nan), (2, math.nan)]
    assert is_flat([flat]) and is_flat([flat, other]) and is_flat([flat, alone, []])
    assert not is_flat([flat, [(1, 2.0), (2, 2.5)]])
    assert not is_flat([alone]), "a run of one iteration has curves to come"
    assert not is_flat([lost]) and not is_flat([[*flat, (3, math.inf)]])


def test_the_layout_by_replica_stage_and_rank(tmp_path: Path) -> None:
    [run] = data(read_runs([make_run(tmp_path / "run")], sampled_iterations=9))["runs"]
    assert run["layout"] == {
        "world": 4,
        "roles": [
            {"name": "actor", "sizes": "tp 2, pp 2, dp 1", "replicas": [[[0, 1], [2, 3]]], "names": ["dp 0"]},
            {"name": "critic", "sizes": "tp 1, pp 1, dp 2", "replicas": [[[2]], [[3]]], "names": ["dp 0", "dp 1"]},
            {
                "name": "rollout",
                "sizes": "tp 2, pp 1, 2 replicas",
                "replicas": [[[0, 1]], [[2, 3]]],
                "names": ["replica 0", "replica 1"],
            },
        ],
    }


def test_the_layout_of_ranks_that_share_tokens(tmp_path: Path) -> None:
    [run] = read_runs([make_run(tmp_path / "run")], sampled_iterations=9)
    layout = RunLayout(8, {"actor": Layout(1, 2, 2, tuple(range(8)), cp=2)}, None)
    [found] = data([replace(run, layout=layout)])["runs"]
    assert found["layout"]["roles"] == [
        {
            "name": "actor",
            "sizes": "tp 1, pp 2, dp 2, cp 2",
            "replicas": [[[0], [4]], [[1], [5]], [[2], [6]], [[3], [7]]],
            "names": ["dp 0, cp 0", "dp 0, cp 1", "dp 1, cp 0", "dp 1, cp 1"],
        }
    ]


def test_the_load_of_experts_by_layer(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    assert data(read_runs([path], sampled_iterations=9))["runs"][0]["experts"] == []
    writer = ExpertsLoadWriter(path, csv=True)
    for iteration, load in ((1, {10: 3.0, 9: 1.5}), (2, {10: 2.0}), (3, {10: 2.5, 9: 1.25})):
        writer.write(iteration, load)
    writer.close()
    [run] = read_runs([path], sampled_iterations=9)
    assert run.experts_load == {9: [(1, 1.5), (3, 1.25)], 10: [(1, 3.0), (2, 2.0), (3, 2.5)]}
    assert data([run])["runs"][0]["experts"] == [
        {"layer": 9, "first": "1.5", "last": "1.25", "mean": "1.375", "largest": "1.5"},
        {"layer": 10, "first": "3", "last": "2.5", "mean": "2.5", "largest": "3"},
    ]


def test_long_samples_are_cut_and_other_fields_kept(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_iterations=1)
    long = {"iteration": 2, "prompt": [{"role": "user"}], "response": "é" * 4005, "score": None, "parts": {"a": 1.5}}
    with (path / "samples.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
        file.write('{"iteration": 2, "prompt": "", "response": "", "score": NaN}\n' * 20)
    [run] = data(read_runs([path], sampled_iterations=9))["runs"]
    second = run["samples"]["iterations"][1]
    assert (second["count"], len(second["rows"])) == (21, 16)
    assert second["rows"][0] == {
        "prompt": {"text": '[{"role": "user"}]', "cut": 0},
        "response": {"text": "é" * 4000, "cut": 5},
        "answer": None,
        "score": None,
        "number": None,
        "heldout": False,
        "more": {"parts": {"text": '{"a": 1.5}', "cut": 0}},
    }
    assert second["rows"][1]["score"] == "nan"
