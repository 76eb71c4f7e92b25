"""Engines that generate beside the models: what an iteration takes, what ranks hold, and the search over divisions."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hybridflow.automap.placements import Placement, placements
from hybridflow.automap.search import SearchRequest, _Search, search
from hybridflow.automap.time_report import time_report
from hybridflow.automap.timing import Prediction, predict
from hybridflow.cli.plan import main
from hybridflow.config import ExperimentConfig
from hybridflow.config.kinds import load_config
from hybridflow.errors import ConfigError
from hybridflow.placement.footprint import together
from hybridflow.placement.forecast import RunMemory, fullest
from hybridflow.placement.placed import PlacedRun, place
from tests.automap.round_profile import overheads, profile
from tests.automap.test_search import DEVICE, GRPO, NARROW
from tests.test_plan import CONFIG, MODELS, SMALL

FLOAT32 = ("actor.dtype=float32", "reference.dtype=float32")
APART = ("actor.ranks=0-1", "reference.ranks=0-1", "rollout.ranks=2-3", "rollout.tensor_parallel_size=1")
STALE = "rollout.max_staleness=1"
# of an iteration's 16 rows of 6 + 4 tokens; a sum over n ranks takes 2 log2 n latencies of 0.5 s
WHOLE, NOTE = 2 + 2 * 3 / 4 * 4 * 160 / 1e4, 2.0  # over 4 ranks
OWN_WHOLE, OWN_NOTE = 1 + 2 * 1 / 2 * 4 * 160 / 1e4, 1.0  # over the 2 that train


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the models' config.json and grpo.yaml."""
    for name, changes in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SMALL | changes))
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(CONFIG | GRPO))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(*overrides: str) -> ExperimentConfig:
    config = load_config("grpo.yaml", [*FLOAT32, *overrides])
    assert isinstance(config, ExperimentConfig)
    return config


def run_of(*overrides: str) -> PlacedRun:
    return place(config_of(*APART, *overrides), 4, cuda=False)


def seconds_of(found: Prediction, *left_out: str) -> float:
    return sum(seconds for phase, seconds in found.phases.items() if phase not in left_out)


# ------------------------------------------------------------------------------------------------ seconds


@pytest.mark.parametrize("step", [0.0, 200.0], ids=["models take longer", "the engine takes longer"])
def test_an_iteration_takes_the_longer_of_both_and_what_all_ranks_do(step: float) -> None:
    """step: seconds of the engine's that come on top of each of its steps."""
    device = profile(overheads=overheads(engine_step=step))
    synchronous, stale = predict(run_of(), device), predict(run_of(STALE), device)
    assert synchronous.seconds == pytest.approx(seconds_of(synchronous))  # one after the other
    models = seconds_of(synchronous, "reshard", "generate", "exchange") + OWN_WHOLE + 7 * OWN_NOTE
    reshard, generate = synchronous.phases["reshard"], synchronous.phases["generate"]
    hand_over = 2 * WHOLE + 3 * NOTE
    assert synchronous.phases["exchange"] == pytest.approx(hand_over + WHOLE + 7 * NOTE)
    assert (generate > models) == (step > 0)
    assert stale.seconds == pytest.approx(reshard + max(generate, models) + hand_over)
    assert stale.phases["hand_over"] == pytest.approx(hand_over)
    found = time_report(run_of(STALE), device)["side_by_side"]
    assert found == pytest.approx({"engine": generate, "models": models, "together": reshard + hand_over})
    assert time_report(run_of(), device)["side_by_side"] is None
    waiting = 1 - (reshard + generate + hand_over) / stale.seconds
    assert stale.idle[3] == pytest.approx(waiting, abs=1e-9)


def test_nothing_is_offloaded_for_an_engine_that_lies_apart() -> None:
    keys = ("actor.offload_optimizer=true", "actor.offload_gradients=true")
    found = [predict(run_of(STALE, *more), profile()).seconds for more in ((), keys)]
    assert found[0] == found[1]
    assert predict(run_of(*keys), profile()).seconds > predict(run_of(), profile()).seconds


def test_the_plan_says_both_parts_and_who_waits(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    (directory / "own.json").write_text(profile(overheads=overheads(engine_step=200.0)).model_dump_json())
    line = ["grpo.yaml", "--world-size", "4", "--time", "--profile", "own.json", *FLOAT32, *APART]
    assert main([*line, STALE, "--json"]) == 0
    time = json.loads(capsys.readouterr().out)["time"]
    assert main([*line, STALE]) == 0
    told = " ".join(capsys.readouterr().out.split())
    parts = time["side_by_side"]
    assert time["seconds"] == pytest.approx(max(parts["engine"], parts["models"]) + parts["together"])
    for name in ("engine", "models", "together"):
        assert f"{parts[name]:,.1f} s" in told or f"{parts[name]:.2f} s" in told
    waits = parts["engine"] - parts["models"]
    assert f"the models would wait {waits:,.1f} s for the engine" in told
    assert main(line) == 0
    assert "Side by side" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ memory


def test_ranks_that_train_hold_no_engine_and_those_of_the_engine_all_of_it_always() -> None:
    keys = ("actor.offload_optimizer=true", "rollout.sleep_level=0")
    memory, synchronous = RunMemory(run_of(STALE, *keys)), RunMemory(run_of(*keys))
    training, generation = memory.moments()["training"], memory.moments()["generation"]
    assert [sorted(training(rank)) for rank in range(4)] == [["actor", "reference"]] * 2 + [[]] * 2
    assert [sorted(generation(rank)) for rank in range(4)] == [[]] * 2 + [["engine"]] * 2
    assert training(0)["actor"].optimizer > 0
    engine = generation(2)["engine"]
    assert engine == synchronous.moments()["generation"](2)["engine"]
    elements = 2 * 64 * 8 + 2 * (24 * 8 + 8 * 8 + 32 * 8 + 8 * 16 + 2 * 64) + 64  # a norm of 8 has 256 bytes
    assert engine.weights == 4 * elements  # float32, all of the engine's own
    assert engine.kv_cache == memory.run.kv_cache.whole
    assert fullest(memory.run).bytes == max(engine.total, together(list(training(0).values())).total)


# ------------------------------------------------------------------------------------------------ the search


def test_the_engine_lies_alone_and_last() -> None:
    found = list(placements(("actor", "reference", "engine"), 4, ranks_per_host=8, apart="engine"))
    assert Placement(actor=(0, 1), reference=(0, 1), engine=(2, 3)) in found
    assert Placement(actor=(0,), reference=(0,), engine=(1, 2, 3)) in found
    assert all(each["engine"][-1] == 3 and 0 not in each["engine"] for each in found)
    assert not any(set(each["engine"]) & {*each["actor"], *each["reference"]} for each in found)
    assert len(found) == 3 + 3  # of two groups 3 + 1, 2 + 2 and 1 + 3; of three 2 + 1 + 1 in every order


@pytest.mark.parametrize("part", [1.0, 0.7])
def test_what_is_cut_off_is_not_among_the_best(part: float) -> None:
    asked = SearchRequest(config_of(*APART, *NARROW, STALE), 4, DEVICE, 1 << 40)
    loose = search(replace(asked, shown=1)).plans[0].fullest.bytes
    asked = replace(asked, memory_bytes=int(part * loose))
    pruned, whole = (_Search(asked, exhaustive=each).run() for each in (False, True))
    assert pruned.plans
    assert [plan.seconds for plan in pruned.plans] == pytest.approx([plan.seconds for plan in whole.plans])
    for plan in pruned.plans:
        if plan.choice is not None:
            assert plan.choice.seconds <= plan.seconds * (1 + 1e-9)
            assert plan.choice.bytes == plan.fullest.bytes
            assert isinstance(plan.config, ExperimentConfig) and not plan.config.actor.offload_optimizer


def test_the_winner_is_the_best_of_all_divisions_placed_and_timed_one_by_one() -> None:
    sizes = {f"{name}.tensor_parallel_size": (1, 2) for name in ("actor", "reference", "rollout")}
    base = (*NARROW, "actor.micro_batch_tokens=10", STALE)
    found = []
    for chosen in itertools.product(*sizes.values()):
        cut = [f"{key}={value}" for key, value in zip(sizes, chosen, strict=True)]
        for division in placements(("actor", "reference", "engine"), 4, ranks_per_host=8, apart="engine"):
            lie = [f"{name}.ranks={division[name][0]}-{division[name][-1]}" for name in ("actor", "reference")]
            engine = f"rollout.ranks={division['engine'][0]}-{division['engine'][-1]}"
            try:
                found.append(predict(place(config_of(*base, *cut, *lie, engine), 4), DEVICE).seconds)
            except ConfigError:
                continue
    free = {name: frozenset({"tensor_parallel_size"}) for name in ("actor", "reference", "engine")}
    asked = SearchRequest(config_of(*APART, *base), 4, DEVICE, 1 << 40, free=free)
    assert len(found) > 10
    assert search(asked).plans[0].seconds == pytest.approx(min(found))


def test_the_command_divides_the_ranks_where_the_config_does_not(
    capsys: pytest.CaptureFixture[str], directory: Path
) -> None:
    line = ["grpo.yaml", "--search", "--gpus", "4", "--profile", "h100-sxm", *FLOAT32, STALE, "--minutes", "0.1"]
    assert main(line) == 0, capsys.readouterr().err
    best = load_config("best.yaml", [])
    assert isinstance(best, ExperimentConfig) and best.rollout.max_staleness == 1
    assert best.rollout.ranks is not None and best.rollout.ranks[-1] == 3
