"""`python -m hybridflow.plan --time`: its tables and its JSON, and what is wrong with what it is given."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.cli.plan import main
from tests.automap.round_profile import FIELDS
from tests.test_plan import CONFIG, MODELS, SMALL

FLOAT32 = tuple(f"{role}.dtype=float32" for role in ("actor", "critic", "reference", "reward.models.0"))
TIME = ("config.yaml", "--world-size", "2", "--time", "--profile", "own.json", *FLOAT32)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the models' config.json, config.yaml and a profile."""
    for name, changes in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SMALL | changes))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "own.json").write_text(json.dumps(FIELDS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*TIME, "--json", *arguments]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["time"]
    return found


def test_json_has_phases_idle_shares_and_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    assert (found["profile"], found["measured"], found["tokens"]) == ("round", False, 80)
    assert found["tokens_per_second_per_device"] == pytest.approx(80 / found["seconds"] / 2)
    assert sum(row["seconds"] for row in found["phases"]) == pytest.approx(found["seconds"])
    assert [row["bound"] for row in found["phases"] if row["phase"] == "exchange"] == ["links"]
    assert found["idle"] == [{"ranks": "0-1", "share": 0.0}]


def test_shorter_responses_take_less(capsys: pytest.CaptureFixture[str]) -> None:
    whole, half = report(capsys), report(capsys, "--response-tokens", "2", "--prompt-tokens", "3")
    assert half["seconds"] < whole["seconds"]
    assert half["tokens"] == 8 * 5
    assert half["response_tokens"] == {"mean": 2, "longest": 4}


def test_the_tables_say_what_bounds_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(TIME)) == 0
    out = capsys.readouterr().out
    table = out[out.index("Time of an iteration on round (not measured here)") :]
    rows = {cells[1].strip(): cells for line in table.splitlines() if len(cells := re.split("[│┃]", line)) == 8}
    assert rows["generate"][2].strip() == "engine"
    assert rows["exchange"][6].strip() == "links"
    assert rows["iteration"][3].strip() == "6 + 4 tokens a row"
    assert rows["iteration"][6].strip().endswith("tokens/s per device")
    assert "Idle share" in table
    assert "data.prompts_per_iteration" in table or "Any batch fits" in table
    lines = out.splitlines()
    assert max(len(line) for line in lines if line != lines[-1]) <= 112, "the verdict is one line"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--profile", "none.json"),
            "profile none.json: no such file, and none of that name is shipped: a100-80gb-sxm",
        ),
        (("--response-tokens", "9"), "--response-tokens 9: responses have 4 tokens at most"),
    ],
)
def test_what_cannot_be_is_told(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str) -> None:
    assert main([*TIME, *arguments]) == 1
    assert expected in capsys.readouterr().err


def test_a_config_is_asked_for_unless_the_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--time"])
    assert "required: CONFIG" in capsys.readouterr().err


def test_where_the_profile_goes_is_looked_at_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--profile-device", "--output", "nowhere/profile.json"]) == 1
    assert "--output nowhere/profile.json: " in capsys.readouterr().err
