"""The search and `auto` for runs on fixed data: against all choices tried one by one, and a run of two CPU ranks."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.automap.auto import Facts, resolve
from hybridflow.automap.device import load_profile
from hybridflow.automap.options import everything
from hybridflow.automap.search import SearchRequest, _Search, search
from hybridflow.automap.timing import predict
from hybridflow.cli.plan import main
from hybridflow.config.auto import autos, with_neutral
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import load_config
from hybridflow.errors import ConfigError
from hybridflow.placement.forecast import fullest
from hybridflow.placement.placed import place
from hybridflow.trainers.fixed_data import FixedDataTrainer
from hybridflow.trainers.online import OnlineTrainer
from tests.automap.test_auto import MOST_PARAMETERS, PADDING
from tests.automap.test_search import DEVICE, ENOUGH, directory, told  # noqa: F401  # a fixture
from tests.checkpoint.test_fixed import write_rows
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

ROOT = Path(__file__).resolve().parents[2]
TRAINED = {"model": "small", "optimizer": {"lr": 1e-5}}
ROLES: dict[str, dict[str, Any]] = {
    "sft": {"actor": TRAINED},
    "reward_model": {"reward_model": TRAINED | {"model": "reward"}},
    "dpo": {"actor": TRAINED, "reference": {"model": "small"}},
    "kto": {"actor": TRAINED, "reference": {"model": "small"}},
}
AUTO = {"tensor_parallel_size": "auto", "pipeline_parallel_size": "auto", "micro_batch_tokens": "auto"}


def tree(algorithm: str, **sections: dict[str, Any]) -> dict[str, Any]:
    given = {
        "name": algorithm,
        "num_iterations": 1,
        "data": {"train": "train.jsonl", "batch_size": 8, "max_length": 10},
        "algorithm": {"name": algorithm},
        **ROLES[algorithm],
    }
    return {**given, **{name: given.get(name, {}) | keys for name, keys in sections.items()}}


def config_of(algorithm: str, *overrides: str) -> FixedDataConfig:
    Path("fixed.yaml").write_text(yaml.safe_dump(tree(algorithm)))
    config = load_config("fixed.yaml", list(overrides))
    assert isinstance(config, FixedDataConfig)
    return config


def request(algorithm: str, world_size: int, *overrides: str, **changes: Any) -> SearchRequest:
    return replace(SearchRequest(config_of(algorithm, *overrides), world_size, DEVICE, ENOUGH), **changes)


# ------------------------------------------------------------------------------------------------ against all choices


@pytest.mark.parametrize("algorithm", ROLES)
@pytest.mark.parametrize("part", [1.0, 0.7])  # of the memory that the fastest takes
@pytest.mark.thorough
def test_what_is_cut_off_is_not_among_the_best(algorithm: str, part: float) -> None:
    for num_ranks in (1, 2, 4):
        loose = search(request(algorithm, num_ranks, shown=1)).plans[0].fullest.bytes
        asked = request(algorithm, num_ranks, memory_bytes=int(part * loose))
        pruned, whole = (_Search(asked, exhaustive=each).run() for each in (False, True))
        assert [plan.seconds for plan in pruned.plans] == pytest.approx([plan.seconds for plan in whole.plans])
        assert pruned.plans or num_ranks == 1
        assert told(pruned)[:1] == told(whole)[:1]
        assert all(plan.fullest.bytes <= asked.memory_bytes for plan in pruned.plans)
        if pruned.given is not None:
            assert pruned.plans[0].seconds <= pruned.given.seconds


def test_the_winner_is_the_best_of_all_configs_placed_and_timed_one_by_one() -> None:
    values = {
        "actor.tensor_parallel_size": (1, 2),
        "actor.pipeline_parallel_size": (1, 2),
        "actor.recompute": ("none", "selective", "[core_attn,layernorm,mlp]", "full"),
        "reference.tensor_parallel_size": (1, 2),
        "reference.pipeline_parallel_size": (1, 2),
    }
    base = ("actor.micro_batch_tokens=10", "reference.micro_batch_tokens=20")
    lie = [("0-1", "0-1"), ("0", "1"), ("1", "0")]
    found: list[tuple[float, int]] = []
    for chosen, (actor, reference) in itertools.product(itertools.product(*values.values()), lie):
        overrides = [f"{key}={value}" for key, value in zip(values, chosen, strict=True)]
        try:
            config = config_of("dpo", *base, *overrides, f"actor.ranks='{actor}'", f"reference.ranks='{reference}'")
            run = place(config, 2)
        except ConfigError:
            continue
        found.append((predict(run, DEVICE).seconds, fullest(run).bytes))
    assert len(found) == 4 * 3 * 3 + 4 * 2
    free = {
        name: frozenset(key.partition(".")[2] for key in values if key.startswith(f"{name}."))
        for name in ("actor", "reference")
    }
    for memory in sorted({size for _, size in found}):
        best = search(request("dpo", 2, *base, memory_bytes=memory, free=free)).plans[0]
        assert best.seconds == pytest.approx(min(seconds for seconds, size in found if size <= memory))
        assert best.fullest.bytes <= memory


def test_nothing_is_offloaded_that_no_engine_would_make_room_for() -> None:
    asked = request("sft", 4)
    assert "offload_optimizer" in everything(asked.config)["actor"]
    assert all(not plan.config.roles()["actor"].offload_optimizer for plan in search(asked).plans)


@pytest.mark.parametrize("name", ["ultrachat_mistral_7b_sft", "ultrafeedback_mistral_7b_dpo"])
@pytest.mark.thorough
def test_never_worse_than_a_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(f"configs/recipes/{name}.yaml")
    found = search(SearchRequest(config, 8, load_profile("h100-sxm"), 76 << 30, seconds=120.0))
    assert found.closed and found.given is not None and found.plans[0].seconds <= found.given.seconds
    assert found.plans[0].fullest.bytes <= 76 << 30


# ------------------------------------------------------------------------------------------------ the command, and auto


def test_the_command_writes_what_train_and_plan_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "device.json").write_text(DEVICE.model_dump_json())
    config_of("dpo")
    arguments = ["fixed.yaml", "--search", "--gpus", "4", "--profile", "device.json", "--memory-gib", "5"]
    assert main([*arguments, "--output", "best.yaml", "--svg", "best.svg"]) == 0
    said = capsys.readouterr().out
    for words in ("The fastest that fit", "Against the second:", "the config as given", "With twice the GPUs (8)"):
        assert words in said
    assert "engine" not in said and "generation" not in said
    best = search(SearchRequest(config_of("dpo"), 4, DEVICE, 1 << 30)).plans[0]
    assert load_config("best.yaml") == best.config
    assert main(["best.yaml", "--world-size", "4", "--time", "--profile", "device.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["training"]["worst_rank"]["total"] == best.fullest.bytes
    assert found["time"]["seconds"] == pytest.approx(best.seconds)
    assert (tmp_path / "best.svg").read_text().startswith("<svg")


def test_what_auto_stands_for_is_the_best_and_all_else_stays() -> None:
    given = tree("reward_model", reward_model=AUTO | {"recompute": "auto", "offload_gradients": "auto"})
    assert autos(given) == {"reward_model": {*AUTO, "recompute", "offload_gradients"}}
    resolved = resolve(given, "x.yaml", 4, Facts(DEVICE, ENOUGH, 0, "round devices"))
    config = FixedDataConfig.from_tree(resolved.tree, "x.yaml")
    assert autos(resolved.tree) == {} and not config.trained.offload_gradients
    assert config.trained.optimizer == FixedDataConfig.from_tree(with_neutral(given), "x.yaml").trained.optimizer
    free = autos(given)
    best = search(request("reward_model", 4, free=free)).plans[0]
    assert predict(place(config, 4), DEVICE).seconds == pytest.approx(best.seconds)
    with pytest.raises(ConfigError, match=r"no layout fits on 4 ranks of round devices"):
        resolve(given, "x.yaml", 4, Facts(DEVICE, 1000, 0, "round devices"))
    with pytest.raises(ConfigError, match=r"reward_model.ranks names rank 9, the run has 4 ranks"):
        resolve(tree("reward_model", reward_model=AUTO | {"ranks": "9"}), "x", 4, Facts(DEVICE, ENOUGH, 0, ""))


def test_a_config_of_the_other_kind_is_refused_before_any_rank_waits(tmp_path: Path) -> None:
    """With `auto` as without it."""
    (tmp_path / "fixed.yaml").write_text(json.dumps(tree("dpo", actor=AUTO)))
    with pytest.raises(ConfigError, match=r"dpo.*this algorithm trains on fixed data"):
        OnlineTrainer.from_yaml(str(tmp_path / "fixed.yaml"))
    with pytest.raises(ConfigError, match=r"this algorithm trains on fixed data"):
        FixedDataTrainer.from_yaml(ROOT / "configs/quickstart.yaml", ["actor.tensor_parallel_size=auto"])


# ------------------------------------------------------------------------------------------------ a real run


# layouts that no search of so small a case would choose, whose activations have other terms
CUT: dict[str, dict[str, Any]] = {
    "tensors": {"tensor_parallel_size": 2, "recompute": "none"},
    "sequences": {"tensor_parallel_size": 2, "sequence_parallel": True, "recompute": "selective"},
    "again": {"recompute": "full"},
    "stages": {"pipeline_parallel_size": 2, "recompute": "none", "micro_batch_tokens": 24},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT of auto_worker: dpo with `auto`, and sft in each layout of `CUT`, on two ranks."""
    root = tmp_path_factory.mktemp("fixed_auto")
    make_checkpoints(root / "models", family="llama", tied=False)
    write_rows(root / "train.jsonl", 16, seed=1)
    float32 = {"dtype": "float32", **AUTO}
    given = tree("dpo", actor=float32 | {"recompute": "auto"}, reference=float32)
    given["actor"]["model"], given["reference"]["model"] = str(root / "models/policy"), str(root / "models/reference")
    given["data"] = {"train": str(root / "train.jsonl"), "batch_size": 4, "max_length": 24}
    given |= {"output_dir": str(root), "platform": "cpu", "metrics": {"tensorboard": False}}
    (root / "fixed.yaml").write_text(json.dumps(given))
    for name, keys in CUT.items():
        actor = {"model": str(root / "models/policy"), "dtype": "float32", "optimizer": {"lr": 1e-5}, **keys}
        sft = {"algorithm": {"name": "sft"}, "name": name, "actor": actor}
        (root / f"{name}.yaml").write_text(json.dumps({k: v for k, v in given.items() if k != "reference"} | sft))
    configs = (root / f"{name}.yaml" for name in ("fixed", *CUT))
    (root / "said").write_text(run_ranks(2, "tests.automap.auto_worker", root, 1, *configs).stdout)
    return root


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_ranks_choose_the_same_write_numbers_and_hold_what_is_counted(runs: Path) -> None:
    root, said = runs, (runs / "said").read_text()
    assert said.count("actor.tensor_parallel_size = ") == 1 and "(auto)" in said  # of rank 0
    first, second = (json.loads((root / f"fixed_{rank}.json").read_text()) for rank in (0, 1))
    assert first["chosen"] == second["chosen"]
    saved = load_config(root / "dpo" / "config.yaml")
    assert isinstance(saved, FixedDataConfig)
    for name, role in saved.roles().items():
        for key in AUTO:
            assert first["chosen"][f"{name}.{key}"] == getattr(role, key) != "auto"
    assert place(saved, 2).trained.layout.ranks == (0, 1)
    for found in (first, second):
        for kind, size in found["actor"]["counted"].items():
            # padding is at the end of a bucket, which with ZeRO-1 the last rank has
            assert found["actor"]["held"][kind] == pytest.approx(size, abs=MOST_PARAMETERS * PADDING), kind


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("name", CUT)
def test_autograd_keeps_what_the_table_has_for_as_many_tokens(name: str, runs: Path) -> None:
    for rank in (0, 1):
        seen = json.loads((runs / f"{name}_{rank}.json").read_text())["actor"]["activations"]
        assert seen
        for each in seen:
            # the table has outputs of all tokens, and float32 copies that autograd does not keep
            assert 0.9 * (each["counted"] - each["outputs"]) <= each["kept"] <= 1.05 * each["counted"], (rank, each)
