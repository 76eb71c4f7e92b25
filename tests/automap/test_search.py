"""The search against all choices tried one by one, its memory against the plan's table, and what it says."""

import itertools
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import hybridflow.automap.search as searching
from hybridflow.automap import branch_search
from hybridflow.automap.auto import why_nothing_fits
from hybridflow.automap.branch_search import BranchSearch
from hybridflow.automap.choices import Best, Counts
from hybridflow.automap.device import load_profile
from hybridflow.automap.engine_memory import EngineMemory
from hybridflow.automap.explained import differences, phase_changes
from hybridflow.automap.options import everything
from hybridflow.automap.search import (
    Found,
    SearchedPlan,
    SearchRequest,
    _Search,
    known_of,
    least_that_fits,
    plan_of,
    search,
)
from hybridflow.automap.timing import predict
from hybridflow.cli.plan import main
from hybridflow.cli.plan_search import _looked, ranks_per_host
from hybridflow.config import ExperimentConfig
from hybridflow.config.kinds import load_config
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Layout
from hybridflow.placement.forecast import fullest
from hybridflow.placement.margin import COMMUNICATOR, least_margin
from hybridflow.placement.placed import place
from hybridflow.placement.reshard import EngineHoldings, ReshardForecast
from hybridflow.reshard.groups import rollout_layout
from hybridflow.reshard.plan import plan_reshard
from tests.automap.round_profile import overheads, profile, small_spec
from tests.messages import like
from tests.test_plan import CONFIG, MODELS, SMALL

ROOT = Path(__file__).resolve().parents[2]
ENOUGH = 1 << 40
GRPO = {
    "algorithm": {"name": "grpo", "kl": {"use": "loss"}, "update": {"mini_batch_size": 8}},
    "critic": None,
    "reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]},
    "sampling": {"max_response_length": 4, "samples_per_prompt": 2},
}
# an engine that is no larger than the models, so that their memory decides
NARROW = ("rollout.kv_cache_gib=1e-4", "rollout.max_num_seqs=4", "rollout.max_num_batched_tokens=16")
SHARED = {"products": 2.0, "memory": 1.5, "overhead": 2.0}
# so that every size makes a difference
DEVICE = profile(
    products={"float32": {"peak": 1e6, "half_size": 4}, "bfloat16": {"peak": 2e6, "half_size": 4}},
    inside={"bandwidth": 1e6, "latency": 1e-4},
    between={"bandwidth": 1e5, "latency": 1e-3},
    overheads=overheads(layer_forward=1e-3, layer_backward=2e-3, micro_batch=1e-3, step=0.01, engine_step=1e-3),
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the models' config.json and config.yaml."""
    for name, changes in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SMALL | changes))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(CONFIG | GRPO))
    monkeypatch.chdir(tmp_path)
    return tmp_path


ON_GPUS = "platform=cuda"


def config_of(file: str, *overrides: str) -> ExperimentConfig:
    config = load_config(file, list(overrides))
    assert isinstance(config, ExperimentConfig)
    return config


def request(file: str, world_size: int, *overrides: str, **changes: Any) -> SearchRequest:
    given = SearchRequest(config_of(file, *overrides), world_size, DEVICE, ENOUGH)
    return replace(given, **changes)


def told(found: Found) -> list[tuple[float, str]]:
    return [(plan.seconds, plan.config.to_yaml()) for plan in found.plans]


# ------------------------------------------------------------------------------------------------ against all choices


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("part", [1.0, 0.8, 0.6])  # of the memory that the fastest takes
def test_what_is_cut_off_is_not_among_the_best(num_ranks: int, part: float) -> None:
    loose = search(request("grpo.yaml", num_ranks, *NARROW, shown=1)).plans[0].fullest.bytes
    asked = request("grpo.yaml", num_ranks, *NARROW, memory_bytes=int(part * loose))
    free = {name: keys - {"kv_cache_gib", "offload_gradients"} for name, keys in everything(asked.config).items()}
    pruned, whole = (_Search(replace(asked, free=free), exhaustive=each).run() for each in (False, True))
    seconds = [[plan.seconds for plan in found.plans] for found in (pruned, whole)]
    assert seconds[0] == pytest.approx(seconds[1]), (pruned.counts, whole.counts)
    assert pruned.plans or part < 1 or num_ranks == 1
    if pruned.plans:
        assert told(pruned)[0] == told(whole)[0]
        assert pruned.counts.branches <= whole.counts.branches


@pytest.mark.thorough
def test_the_winner_is_the_best_of_all_configs_placed_and_timed_one_by_one() -> None:
    """Independent of the search's enumeration, of its memory and of its bound."""
    values = {
        "actor.tensor_parallel_size": (1, 2),
        "actor.pipeline_parallel_size": (1, 2),
        "actor.recompute": ("none", "full"),
        "reference.tensor_parallel_size": (1, 2),
        "rollout.tensor_parallel_size": (1, 2),
    }
    base = (*NARROW, "actor.micro_batch_tokens=10")
    lie = [
        [f"{key}.ranks='{at}'" for key, at in zip(("actor", "reference", "rollout"), each, strict=True)]
        for each in [("0-1",) * 3, *itertools.product("01", repeat=3)]
    ]
    found: list[tuple[float, int]] = []
    for chosen in itertools.product(*values.values()):
        overrides = [f"{key}={value}" for key, value in zip(values, chosen, strict=True)]
        for ranks in lie:
            try:
                run = place(config_of("grpo.yaml", *base, *overrides, *ranks), 2)
            except ConfigError:
                continue
            found.append((predict(run, DEVICE).seconds, fullest(run).bytes))
    assert len(found) == 36
    free = {
        name: frozenset(key.partition(".")[2] for key in values if key.startswith(f"{section}."))
        for name, section in (("actor", "actor"), ("reference", "reference"), ("engine", "rollout"))
    }
    for memory in sorted({size for _, size in found}):
        best = search(request("grpo.yaml", 2, *base, memory_bytes=memory, free=free)).plans[0]
        assert best.seconds == pytest.approx(min(seconds for seconds, size in found if size <= memory))
        assert best.fullest.bytes <= memory


@pytest.mark.parametrize("shared", [None, SHARED])
@pytest.mark.thorough
def test_the_bound_is_below_what_is_predicted(shared: dict[str, float] | None) -> None:
    device = DEVICE if shared is None else DEVICE.model_validate(DEVICE.model_dump() | {"shared": shared})
    found = search(request("config.yaml", 2, profile=device, shown=12))
    assert len(found.plans) == 12
    for plan in found.plans:
        if plan.choice is not None:
            assert plan.choice.seconds <= plan.seconds * (1 + 1e-9)
            if shared is None:  # but for the reshard, all is in it
                reshard = plan.prediction.phases.get("reshard", 0.0)
                assert plan.choice.seconds >= plan.seconds - reshard - 1e-2


# ------------------------------------------------------------------------------------------------ memory


def test_what_the_search_counts_is_the_table_of_the_plan() -> None:
    found = search(request("config.yaml", 4, shown=40))
    assert {len(plan.choice.placement.groups) for plan in found.plans if plan.choice} >= {1}
    for plan in found.plans:
        assert plan.choice is None or plan.choice.bytes == plan.fullest.bytes == fullest(place(plan.config, 4)).bytes


def test_the_search_counts_what_libraries_take_of_a_gpu() -> None:
    """All but the graphs of an engine of several stages, here 2 layers."""
    found = search(request("config.yaml", 4, "platform=cuda", shown=12, memory_bytes=8 << 30))
    parts, least = [plan for plan in found.plans if plan.choice], least_margin(4).total
    lacking = [plan.fullest.needed - plan.choice.bytes - least for plan in parts if plan.choice]
    assert min(map(abs, lacking)) == 0 and max(map(abs, lacking)) < COMMUNICATOR // 4
    tight = min(plan.fullest.needed for plan in parts)
    assert all(plan.fullest.needed <= tight for plan in search(replace(found.request, memory_bytes=tight)).plans)
    assert search(replace(found.request, memory_bytes=tight)).plans


@pytest.mark.thorough
def test_on_every_placement_the_count_is_never_below_the_table() -> None:
    asked = request("config.yaml", 4, "actor.offload_gradients=true")
    whole, seen = _Search(asked, exhaustive=False), set()
    engines = EngineMemory(whole.options)
    for placement in whole._placements():
        best = Best(2)
        branches = BranchSearch(whole.options, placement, ENOUGH, engines)
        assert branches.search(best, Counts(), exhaustive=False, until=float("inf"))
        for plan in whole._timed(best):
            assert plan.choice is not None and plan.choice.bytes >= plan.fullest.bytes, placement
            seen.add(len(placement.groups))
    assert seen == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("sizes", "engine"),
    [((2, 2, 2), (1, 1)), ((2, 2, 2), (4, 1)), ((1, 2, 2), (1, 2)), ((2, 1, 2), (2, 1)), ((2, 2, 1), (2, 2))],
)
def test_shards_of_the_engine_without_what_travels(sizes: tuple[int, int, int], engine: tuple[int, int]) -> None:
    spec = small_spec(num_layers=4, num_heads=4, num_kv_heads=2)
    tp, pp, dp = sizes
    train = Layout(tp, pp, dp, tuple(range(tp * pp * dp)))
    for bucket in (0, 500, 100_000):
        plan = plan_reshard(spec, train, rollout_layout(train, *engine), bucket_elements=1000)
        known = EngineHoldings(plan, spec, itemsize=4, bucket_elements=bucket)
        full = ReshardForecast(plan, spec, itemsize=4, bucket_elements=bucket).memory
        assert [known.own_and_released(rank) for rank in train.ranks] == [
            (full[r].own, full[r].released) for r in train.ranks
        ]


def test_memory_leaves_nothing_that_is_larger() -> None:
    loose = search(request("config.yaml", 2, shown=1)).plans[0]
    tight = search(request("config.yaml", 2, shown=5, memory_bytes=loose.fullest.bytes - 1))
    assert tight.plans and all(plan.fullest.bytes < loose.fullest.bytes for plan in tight.plans)
    assert tight.plans[0].seconds >= loose.seconds


# ------------------------------------------------------------------------------------------------ what it promises


@pytest.mark.parametrize("ranks", [64, 256, 1024])
@pytest.mark.thorough
def test_a_shipped_layout_is_among_those_that_are_looked_at(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parallel sizes, placement and cache free, which is quick: all others as the config has them."""
    monkeypatch.chdir(ROOT)
    config, device, room = config_of(f"configs/qwen2_72b_{ranks}gpus.yaml", ON_GPUS), load_profile("h100-sxm"), 80 << 30
    sizes = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "kv_cache_gib"}
    free = {name: keys & sizes for name, keys in everything(config).items()}
    found = search(SearchRequest(config, ranks, device, room, free=free, seconds=240.0, shown=1))
    assert found.closed and not found.unseen
    given = place(config, ranks)
    assert fullest(given).needed <= room >= found.plans[0].fullest.needed
    assert found.plans[0].seconds <= predict(given, device).seconds


@pytest.mark.thorough
def test_never_worse_than_a_shipped_config_by_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = config_of("configs/llama3_8b_8gpus.yaml", ON_GPUS)
    found = search(SearchRequest(config, 8, load_profile("h100-sxm"), 80 << 30, seconds=240.0, shown=3))
    assert found.given is not None and found.plans[0].seconds <= found.given.seconds
    assert found.plans[0].fullest.needed <= 80 << 30 and found.closed and not found.unseen


def test_twice_the_same_question_has_twice_the_same_answer() -> None:
    assert told(search(request("config.yaml", 4))) == told(search(request("config.yaml", 4)))


def test_without_time_it_tells_what_it_has_not_looked_at() -> None:
    found = search(request("config.yaml", 4, seconds=0.0))
    assert found.unseen == found.placements > 100
    assert not found.closed


def test_layouts_are_timed_until_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 s, of which each full timing takes 10, that of the config as given first."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def timed(*arguments: Any) -> SearchedPlan:
        clock.now += 10
        return plan_of(*arguments)

    for module in (searching, branch_search):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(searching, "plan_of", timed)
    found = search(request("config.yaml", 4, seconds=25.0))
    assert (len([plan for plan in found.plans if plan.choice]), found.untimed, found.closed) == (2, 10, False)
    assert not found.unseen and "10 kept layouts" in "".join(_looked(found))
    clock.now = 0.0
    found = search(replace(request("config.yaml", 4, seconds=15.0), shown=1))
    assert len([plan for plan in found.plans if plan.choice]) == 1, "one is timed whatever it takes"


def test_a_reference_that_becomes_the_actor_stays_where_that_lies() -> None:
    found = search(request("config.yaml", 4, "algorithm.kl.reset_reference_interval=2"))
    assert found.plans
    for plan in found.plans:
        assert plan.placed.models["reference"].layout == plan.placed.models["actor"].layout


@pytest.mark.slow
def test_what_would_fit_is_told_where_nothing_does() -> None:
    asked = request("config.yaml", 2, *NARROW, memory_bytes=20_000)
    assert search(asked).plans == []
    least = least_that_fits(asked)
    assert least.memory_bytes is not None and least.plan is not None
    assert search(replace(asked, memory_bytes=least.memory_bytes)).plans
    assert not search(replace(asked, memory_bytes=least.memory_bytes * 95 // 100)).plans
    assert least.ranks is None or search(replace(asked, world_size=least.ranks)).plans


def test_a_search_that_ends_early_says_so_and_not_that_nothing_fits() -> None:
    asked = replace(request("config.yaml", 4), seconds=0.0, refused="is refused")
    found = search(asked)
    assert found.plans == [] and search(replace(asked, seconds=60.0)).plans
    ended, others = why_nothing_fits(found, "round")
    assert ended.startswith("the search ended after") and "no layout fits" not in ended
    assert others.startswith("others may fit: hybridflow plan --search --gpus 4 --minutes M")


def test_the_least_is_looked_for_no_longer_than_there_is_time() -> None:
    asked = request("config.yaml", 2, *NARROW, memory_bytes=20_000)
    begun = time.monotonic()
    least = least_that_fits(asked, until=begun)
    assert not least.in_time and least.ranks is None and time.monotonic() - begun < 30
    lines = why_nothing_fits(replace(search(asked), closed=True), "round", until=begun)
    assert lines[0].startswith("no layout fits") and lines[-1].startswith("the time ended before")
    assert not any("no memory suffices" in line for line in lines)


def test_stages_of_the_engine_have_as_many_delta_nets_each() -> None:
    """Others are no choice: 32 layers, of which every fourth has attention, in three stages."""
    root = Path(__file__).parents[2]
    models = [f"{role}.model={root}/configs/shapes/qwen3.5-9b" for role in ("actor", "reference")]
    found = search(request(f"{root}/docs/models/layouts.yaml", 3, *models, "rollout.tensor_parallel_size=1"))
    assert found.plans and {plan.placed.rollout.pp for plan in found.plans} == {1}


def test_differences_of_two_plans_by_key_and_by_phase() -> None:
    found = search(request("config.yaml", 4))
    one, other = found.plans[0], found.plans[1]
    keys = differences(one.config, other.config)
    assert keys and all(mine != others for mine, others in keys.values())
    changes = phase_changes(one, other)
    assert all(
        changes[phase] == (one.prediction.phases.get(phase, 0.0), other.prediction.phases.get(phase, 0.0))
        for phase in changes
    )
    gains = [mine - others for mine, others in changes.values()]
    assert gains == sorted(gains)


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_writes_what_train_and_plan_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridflow.cli.plan_search.as_typed", lambda: "hybridflow")
    (tmp_path / "device.json").write_text(DEVICE.model_dump_json())
    arguments = ["config.yaml", "--search", "--gpus", "4", "--profile", "device.json", "--memory-gib", "5"]
    assert main([*arguments, "--output", "best.yaml", "--svg", "best.svg"]) == 0
    said = capsys.readouterr().out
    for words in ("The fastest that fit", "Against the second:", "the config as given", "With twice the GPUs (8)"):
        assert words in said
    assert "With half the memory (2.5 GiB of room)" in said and "wrote best.yaml" in said
    assert said.endswith("\nhybridflow train best.yaml --nproc 4\n")
    assert config_of("best.yaml").platform == "auto", "as the config has it"
    best = search(SearchRequest(config_of("config.yaml", "platform=cuda"), 4, DEVICE, 5 << 30)).plans[0]
    assert config_of("best.yaml", "platform=cuda") == best.config
    assert main(["best.yaml", "--world-size", "4", "--json", "--profile", "device.json", "--memory-gib", "5"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert max(moment["worst_rank"]["total"] for moment in memory.values()) == best.fullest.bytes
    assert (tmp_path / "best.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_a_request_that_nothing_fits_names_what_is_tight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "device.json").write_text(DEVICE.model_dump_json())
    arguments = ["grpo.yaml", "--search", "--gpus", "2", "--profile", "device.json", "--memory-gib", "2"]
    assert main(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("hybridflow.plan: error: no layout fits on 2 ranks of round with room for 2")
    assert "the least is" in lines[1] and " on rank 1 in " in lines[1]


def test_hosts_of_a_search_are_a_number() -> None:
    assert ranks_per_host(64, "4", 8) == 16
    assert ranks_per_host(64, None, 8) == 8
    assert ranks_per_host(4, None, 8) == 4
    with pytest.raises(ConfigError, match=r"--hosts a=8: with --search give a number of hosts"):
        ranks_per_host(8, "a=8", 8)
    with pytest.raises(ConfigError, match=r"--gpus 10 on 4 hosts: 10 = 2 x 4 \+ 2"):
        ranks_per_host(10, "4", 8)


def test_a_search_needs_a_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config.yaml", "--search"]) == 1
    assert capsys.readouterr().err == like("hybridflow.plan: error: --search: give --gpus, on how many devices\n")


# ------------------------------------------------------------------------------------------------ before and beside


def test_what_no_layout_mends_is_refused_before_the_search(directory: Path) -> None:
    """All of it at once: a sequence beyond the positions, and a critic that cannot score."""
    for name in ("small", "reward"):
        file = directory / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 4}))
    with pytest.raises(ConfigError) as raised:
        known_of(request("config.yaml", 4))
    assert str(raised.value).count("exceeds max_position_embeddings = 4") == 2


def test_what_the_plan_suggests_is_tried_first() -> None:
    """Without a second for the search: the config as given does not fit, as suggested it does."""
    loose = search(request("config.yaml", 2, *NARROW, "actor.micro_batch_tokens=4096")).given
    assert loose is not None
    asked = request(
        "config.yaml", 2, *NARROW, "actor.micro_batch_tokens=4096", memory_bytes=loose.fullest.needed - 1, seconds=0.0
    )
    found = search(asked)
    assert found.given is None and found.unseen and found.plans
    assert all(plan.fullest.needed <= asked.memory_bytes for plan in found.plans)


def test_a_search_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "SAID_EVERY", 0.01)
    lines: list[str] = []
    search(request("config.yaml", 4, say=lines.append))
    assert lines and lines[0].startswith("search on 4 ranks of 1,024 GiB: ")
    assert any(re.search(r"placement \d+ of \d+, [\d,]+ branches, \d+ s$", line) for line in lines)


def test_a_suggestion_that_hosts_refuse_is_left_out() -> None:
    """The plan suggests more tensor-parallel ranks than a host has; the search goes on without that."""
    own = [f"{role}.model={ROOT}/configs/shapes/llama-3.3-70b" for role in ("actor",)]
    config = load_config(
        ROOT / "configs/recipes/ultrachat_mistral_7b_sft.yaml", [*own, "actor.tensor_parallel_size=4", ON_GPUS]
    )
    device = load_profile("h100").model_copy(update={"ranks_per_host": 4})
    asked = SearchRequest(config, 16, device, 100 << 30, seconds=0.0)
    assert _Search(asked, exhaustive=False)._given()[:2] == (None, [])
    roomy = replace(asked, profile=device.model_copy(update={"ranks_per_host": 8}))
    assert _Search(roomy, exhaustive=False)._given()[1]
