"""`auto`: which keys, what is chosen, and runs on CPU ranks that choose, end, and choose anew on fewer ranks."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.automap.auto import Facts, resolve
from hybridflow.automap.device import load_profile
from hybridflow.automap.placements import given_placement
from hybridflow.automap.search import SearchRequest, search
from hybridflow.cli.plan import main
from hybridflow.config import ExperimentConfig
from hybridflow.config.auto import autos, with_neutral
from hybridflow.config.kinds import load_config
from hybridflow.errors import ConfigError
from hybridflow.placement.forecast import fullest
from hybridflow.placement.placed import place
from tests.automap.test_search import DEVICE, directory  # noqa: F401  # a fixture
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks
from tests.test_plan import CONFIG

ENOUGH = 1 << 40
AUTO = {
    "actor": {"tensor_parallel_size": "auto", "pipeline_parallel_size": "auto", "recompute": "auto"},
    "critic": {"data_parallel_size": "auto", "micro_batch_tokens": "auto"},
    "rollout": {"kv_cache_gib": "auto", "tensor_parallel_size": "auto"},
}


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    """The config of test_plan with these keys."""
    return {**CONFIG, **{name: CONFIG.get(name, {}) | keys for name, keys in sections.items()}}


def facts(memory_bytes: int = ENOUGH) -> Facts:
    return Facts(DEVICE, memory_bytes, 0, "round devices")


# ------------------------------------------------------------------------------------------------ trees


def test_where_a_config_says_auto() -> None:
    given = tree(**AUTO, reference={"sequence_parallel": "auto"})
    given["reward"] = {"models": [{"model": "reward", "pipeline_parallel_size": "auto"}]}
    given["name"] = given["platform"] = "auto"  # no size
    assert autos(given) == {
        "actor": {"tensor_parallel_size", "pipeline_parallel_size", "recompute"},
        "critic": {"data_parallel_size", "micro_batch_tokens"},
        "reference": {"sequence_parallel"},
        "reward.models.0": {"pipeline_parallel_size"},
        "engine": {"kv_cache_gib", "tensor_parallel_size"},
    }
    assert autos(CONFIG) == {}


def test_neutral_values_pass_every_check_and_leave_the_rest() -> None:
    given = tree(actor={"tensor_parallel_size": "auto", "sequence_parallel": True, "pipeline_parallel_size": "auto"})
    given["actor"]["virtual_pipeline_parallel_size"] = 2
    neutral = with_neutral(given)
    assert neutral["actor"] == given["actor"] | {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert given["actor"]["tensor_parallel_size"] == "auto"
    ExperimentConfig.from_tree(neutral, "x.yaml")


def test_without_the_pass_auto_is_no_number() -> None:
    with pytest.raises(ConfigError, match=r"actor.tensor_parallel_size = 'auto': "):
        ExperimentConfig.from_tree(tree(actor={"tensor_parallel_size": "auto"}), "x.yaml")


# ------------------------------------------------------------------------------------------------ choices


def test_what_is_chosen_is_the_best_and_all_else_stays() -> None:
    resolved = resolve(tree(**AUTO), "x.yaml", 4, facts())
    config = ExperimentConfig.from_tree(resolved.tree, "x.yaml")
    assert autos(resolved.tree) == {}
    free = autos(tree(**AUTO))
    for name, section in (("actor", config.actor), ("critic", config.critic), ("rollout", config.rollout)):
        given = tree(**AUTO).get(name, {})
        for key, value in given.items():
            if key not in free["engine" if name == "rollout" else name]:
                dumped = section.model_dump(mode="json")[key]
                assert dumped == value or key == "optimizer"
    base = ExperimentConfig.from_tree(with_neutral(tree(**AUTO)), "x.yaml")
    none: frozenset[str] = frozenset()
    whole = (0, 1, 2, 3)
    placement = given_placement(dict.fromkeys(base.roles(), whole), whole)
    wanted = SearchRequest(base, 4, DEVICE, ENOUGH, free={n: free.get(n, none) for n in placement}, placement=placement)
    best = search(wanted).plans[0]
    assert resolved.lines[0] == f"actor.pipeline_parallel_size = {config.actor.pipeline_parallel_size}  (auto)"
    assert f"{best.seconds:.3g} s an iteration" in resolved.lines[len([k for keys in free.values() for k in keys])]
    assert best.config == config


def test_another_number_of_ranks_or_memory_is_another_choice() -> None:
    given = tree(**AUTO)
    chosen = {count: resolve(given, "x.yaml", count, facts()).tree for count in (1, 4)}
    assert chosen[1]["critic"]["data_parallel_size"] == 1 != chosen[4]["critic"]["data_parallel_size"]
    loose = fullest(place(ExperimentConfig.from_tree(chosen[4], "x"), 4)).bytes
    tight = ExperimentConfig.from_tree(resolve(given, "x.yaml", 4, facts(loose - 1)).tree, "x")
    assert fullest(place(tight, 4)).bytes < loose


def test_roles_stay_on_the_ranks_that_they_are_given() -> None:
    given = tree(
        actor={"ranks": "0-2", "tensor_parallel_size": "auto", "pipeline_parallel_size": "auto"},
        critic={"ranks": "3", "tensor_parallel_size": "auto"},
        reference={"ranks": "0-1", "tensor_parallel_size": "auto"},  # within the actor's
    )
    given["reward"] = {"models": [{"model": "reward", "ranks": "3"}]}
    given["algorithm"] = {"update": {"mini_batch_size": 8}}
    config = ExperimentConfig.from_tree(resolve(given, "x.yaml", 4, facts()).tree, "x.yaml")
    run = place(config, 4)
    assert (run.actor.layout.ranks, run.models["reference"].layout.ranks) == ((0, 1, 2), (0, 1))
    assert run.actor.layout.tp == 1  # three ranks share no two heads


def test_an_engine_without_a_size_keeps_to_the_actors() -> None:
    run = place(ExperimentConfig.from_tree(resolve(tree(actor=AUTO["actor"]), "x", 2, facts()).tree, "x"), 2)
    assert run.rollout.tp == run.actor.layout.tp and run.config.rollout.tensor_parallel_size is None


def test_what_does_not_fit_is_an_error_with_the_least_that_would() -> None:
    with pytest.raises(ConfigError) as error:
        resolve(tree(**AUTO), "x.yaml", 2, facts(20_000))
    assert "no layout fits on 2 ranks of round devices" in str(error.value)
    assert "the least is " in str(error.value)


def test_a_device_without_room_names_the_ways_to_plan_for_another() -> None:
    """As of a host whose memory many ranks share: a margin for each is more than all of it."""
    with pytest.raises(ConfigError, match=r"nothing is left of a rank's memory: .*--memory-gib.* device_profile"):
        resolve(tree(**AUTO), "x.yaml", 2, replace(facts(), margin_bytes=facts().memory_bytes + 1))


def test_another_error_of_the_config_is_told_before() -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml: seed"):
        resolve(tree(**AUTO) | {"seed": -1}, "x.yaml", 2, facts())
    with pytest.raises(ConfigError, match=r"critic.ranks names rank 5, the run has 2 ranks"):
        resolve(tree(**AUTO | {"critic": {"ranks": "5"}}), "x.yaml", 2, facts())


# ------------------------------------------------------------------------------------------------ commands


def test_plan_takes_such_a_config_and_tells_what_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "auto.yaml").write_text(yaml.safe_dump(tree(**AUTO)))
    (tmp_path / "device.json").write_text(DEVICE.model_dump_json())
    how = ["auto.yaml", "--world-size", "2", "--profile", "device.json", "--memory-gib", "6"]
    assert main(how) == 0
    said = capsys.readouterr().out
    assert "actor.tensor_parallel_size = " in said and "(auto)" in said and "ranks of round" in said
    assert main([*how, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world_size"] == 2 and found["roles"][0]["role"] == "actor"
    assert main([*how[:1], *how[3:], "--smallest"]) == 0
    assert capsys.readouterr().out == "1\n"
    assert main(["auto.yaml", "--hosts", "a=2", "--for-launch"]) == 0
    assert json.loads(capsys.readouterr().out)["num_hosts"] == 1


# ------------------------------------------------------------------------------------------------ real runs


PADDING = 64 * 4  # bytes a parameter, and the buckets', see test_footprint
MOST_PARAMETERS = 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT of auto_worker: `auto` on two ranks and on one, and winners of searches on two."""
    root = tmp_path_factory.mktemp("auto")
    base = json.loads(write_config(root / "auto.yaml", make_inputs(root / "inputs")).read_text())
    for name, keys in AUTO.items():
        base[name] |= keys
    base |= {"checkpoint": {"save_interval": 1}, "platform": "cpu"}
    (root / "auto.yaml").write_text(json.dumps(base))
    config = ExperimentConfig.from_tree(with_neutral(base) | {"checkpoint": {}}, "auto.yaml")
    profile = load_profile("cpu")
    loose = search(SearchRequest(config, 2, profile, ENOUGH, shown=1)).plans[0]
    tight = search(SearchRequest(config, 2, profile, loose.fullest.bytes * 3 // 4, shown=1)).plans[0]
    winners = []
    for name, plan in (("loose", loose), ("tight", tight)):
        found = plan.config.model_copy(update={"name": name})
        winners.append(root / f"{name}.yaml")
        winners[-1].write_text(found.to_yaml())
    run_ranks(2, "tests.automap.auto_worker", root, 1, root / "auto.yaml", *winners)
    for rank in (0, 1):
        (root / f"auto_{rank}.json").rename(root / f"first_{rank}.json")
    run_ranks(1, "tests.automap.auto_worker", root, 2, root / "auto.yaml")
    return root


def read(runs: Path, name: str, rank: int) -> dict[str, Any]:
    return json.loads((runs / f"{name}_{rank}.json").read_text())


@pytest.mark.thorough
@pytest.mark.distributed
def test_all_ranks_have_chosen_the_same_and_written_numbers(runs: Path) -> None:
    first, second = (read(runs, "first", rank)["chosen"] for rank in (0, 1))
    assert first == second
    assert first["actor.tensor_parallel_size"] * first["actor.pipeline_parallel_size"] in (1, 2)
    assert first["critic.data_parallel_size"] in (1, 2)
    assert first["rollout.kv_cache_gib"] > 0
    assert "auto" not in (value for value in first.values() if isinstance(value, str))


@pytest.mark.thorough
@pytest.mark.distributed
def test_on_another_number_of_ranks_it_goes_on_with_another_choice(runs: Path) -> None:
    again = read(runs, "auto", 0)
    assert again["first"] == 2  # from the checkpoint of two ranks
    assert again["chosen"]["actor.tensor_parallel_size"] == again["chosen"]["critic.data_parallel_size"] == 1
    with (runs / "run" / "metrics.csv").open() as rows:
        assert [row["iteration"] for row in csv.DictReader(rows)] == ["1", "2"]
    saved = load_config(runs / "run" / "config.yaml")
    assert isinstance(saved, ExperimentConfig) and saved.actor.tensor_parallel_size == 1


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["first", "loose", "tight"])
def test_winners_of_a_search_hold_what_it_has_counted(runs: Path, name: str) -> None:
    """Weights, gradients and optimizer state of real runs, on each rank, up to megatron's padding."""
    seen = 0
    for rank in (0, 1):
        for role in ("actor", "critic"):
            found = read(runs, name, rank).get(role)
            if found is None:
                continue
            for kind, size in found["counted"].items():
                slack = MOST_PARAMETERS * PADDING * 3 + 4096
                assert size <= found["held"][kind] <= size + slack, (rank, role, kind)
                seen += 1
            for each in found["activations"]:
                # outputs are counted of all tokens, and rotated queries and keys, which here take the place of those
                # that were not; the first pass keeps a hidden state more than those after it
                least = 0.85 * (each["counted"] - each["outputs"])
                assert least <= each["kept"] <= 1.05 * each["counted"], (rank, role, each)
                seen += 1
    assert seen >= 8


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["first", "loose", "tight"])
def test_the_engines_cache_is_as_large_as_counted(runs: Path, name: str) -> None:
    """Up to what is left of a block: keys and values of 128 tokens of both layers, 4 heads of 32 at most."""
    found = [read(runs, name, rank)["kv_cache"] for rank in (0, 1) if "kv_cache" in read(runs, name, rank)]
    assert found
    for each in found:
        assert each["counted"] - 128 * 2 * 2 * 4 * 32 * 4 < each["held"] <= each["counted"]
