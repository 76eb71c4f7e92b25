"""A whole iteration: who works when, what goes by the config, and that a better device is never slower."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.automap.cost import Device
from hybridflow.automap.device import DeviceProfile, load_profile
from hybridflow.automap.time_report import _peak, _with_rows, largest_batch, time_report
from hybridflow.automap.timing import (
    exchange_cost,
    offload_cost,
    predict,
    reshard_cost,
    save_cost,
    scored_rows,
    scoring_cost,
    training_cost,
    work_of,
)
from hybridflow.config.kinds import load_config
from hybridflow.placement.placed import PlacedModels, PlacedRun, place
from hybridflow.reshard.plan import plan_reshard
from tests.automap.round_profile import overheads, profile
from tests.test_plan import CONFIG, MODELS, SMALL

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"products": 2.0, "memory": 1.5, "overhead": 2.0}
TP2 = ("actor.tensor_parallel_size=2", "actor.dtype=float32")
SPLIT = ("actor.ranks=0-1", "reference.ranks=0-1", "critic.ranks=2-3", "reward.models.0.ranks=2-3")
FLOAT32 = tuple(f"{role}.dtype=float32" for role in ("actor", "critic", "reference", "reward.models.0"))


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the models' config.json and config.yaml."""
    for name, changes in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SMALL | changes))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def placed(world_size: int, *overrides: str) -> PlacedModels:
    return place(load_config("config.yaml", [*FLOAT32, *overrides]), world_size, cuda=False)


def run_of(world_size: int, *overrides: str) -> PlacedRun:
    run = placed(world_size, *overrides)
    assert isinstance(run, PlacedRun)
    return run


def test_an_iteration_generates_scores_and_updates_in_the_order_of_the_flow() -> None:
    found = predict(placed(2), profile())
    order = list(dict.fromkeys((span.phase, span.role) for span in found.spans))
    assert order == [
        ("reshard", "actor"),  # queries, keys and values are put in the engine's order
        ("generate", "engine"),
        ("exchange", ""),
        ("reward", "reward.models.0"),
        ("log_probs", "actor"),
        ("reference", "reference"),
        ("values", "critic"),
        ("critic_update", "critic"),
        ("actor_update", "actor"),
    ]
    ends = max(span.begin + span.seconds for span in found.spans)
    assert found.seconds == pytest.approx(ends)
    assert found.seconds == pytest.approx(sum(found.phases.values()))  # one after another on every rank
    assert found.idle == pytest.approx((0.0, 0.0))
    # 8 sequences of 6 + 4 tokens on 2 ranks
    assert found.tokens_per_second_per_device == pytest.approx(80 / found.seconds / 2)


def test_roles_on_ranks_of_their_own_work_at_the_same_time() -> None:
    found = predict(placed(4, *SPLIT), profile())
    spans = {(span.phase, span.ranks): span for span in found.spans}
    assert spans["reward", (2,)].begin == pytest.approx(spans["log_probs", (0,)].begin)
    critic, actor = spans["critic_update", (2, 3)], spans["actor_update", (0, 1)]
    assert critic.begin == pytest.approx(actor.begin)
    # the critic's ranks wait while the engine generates
    assert found.idle[2] > found.idle[0] >= 0
    assert found.idle[2] == pytest.approx(found.idle[3])


PP2 = ("actor.pipeline_parallel_size=2", "actor.micro_batch_tokens=10", "rollout.tensor_parallel_size=1")
ALONE = ("critic=null", "reference=null", "reward={functions: [{function: hybridflow.rewards:numeric_match}]}")


def test_ranks_are_idle_in_the_bubbles_of_a_pipeline() -> None:
    """8 rows of one micro-batch each: a stage waits for what its part of the update and of the scoring leaves."""
    run = run_of(2, *PP2, *ALONE, "sampling.samples_per_prompt=2", "algorithm={name: grpo, kl: {use: none}}")
    found = predict(run, profile())
    update = next(span for span in found.spans if span.phase == "actor_update")
    cost = training_cost(run.actor, run.config, work_of(run.config, profile()), Device(profile()))
    assert update.ranks == (0, 1) and update.waits == pytest.approx([wait / cost.seconds for wait in cost.waits])
    assert min(update.waits) > 0  # the head makes the last stage the longer one: the first waits for it
    assert update.waits[0] > update.waits[1]
    # nothing else waits: each engine is one rank, and all begin together
    cut = [span for span in found.spans if span.phase in ("actor_update", "log_probs")]
    assert all(span.ranks == (0, 1) for span in cut)
    waited = [sum(span.waits[rank] * span.seconds for span in cut) for rank in (0, 1)]
    assert found.idle == pytest.approx([seconds / found.seconds for seconds in waited])


def test_an_engine_of_stages_waits_for_its_tokens() -> None:
    """Of two stages one works at a time."""
    keys = (*ALONE, "sampling.samples_per_prompt=2", "algorithm={name: grpo, kl: {use: none}}")
    found = predict(run_of(2, *keys, "rollout.pipeline_parallel_size=2"), profile())
    generated = found.phases["generate"]
    assert found.idle == pytest.approx((generated / 2 / found.seconds,) * 2)


def test_a_step_of_each_mini_batch_and_epoch() -> None:
    slow = profile(overheads=overheads(step=100.0))
    one = predict(placed(1), slow).phases["actor_update"]
    four = predict(placed(1, "algorithm.update={mini_batch_size: 4, epochs: 2}"), slow).phases["actor_update"]
    assert one // 100 == 1
    assert four // 100 == 4


def test_what_the_algorithm_does_not_ask_for_takes_no_time() -> None:
    found = predict(placed(1, "algorithm.policy.old_log_probs=engine"), profile())
    assert "log_probs" not in found.phases
    assert "reference" in found.phases
    groups = ("critic=null", "reference=null", "sampling.samples_per_prompt=2")
    found = predict(placed(1, *groups, "algorithm={name: grpo, kl: {use: none}}"), profile())
    assert set(found.phases) == {"reshard", "generate", "reward", "actor_update"}  # the only step tells log-probs


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_log_probs_that_come_with_the_first_step_take_no_time(whole_prompts: bool) -> None:
    """Of 16 rows, the first 4: the others are scored, as pairs that share a prompt or as 1.5 rows of each, so two."""
    update = f"update: {{mini_batch_size: 4, whole_prompts: {str(whole_prompts).lower()}}}"
    groups = ("critic=null", "reference=null", "sampling.samples_per_prompt=2")
    run = run_of(1, *groups, f"algorithm={{name: grpo, kl: {{use: none}}, {update}}}")
    work = work_of(run.config, profile())
    rows = scored_rows("actor", run.config, work)
    assert (work.sequences, rows.number, rows.samples) == (16, 12, 2)
    assert scored_rows("reward.models.0", run.config, work).number == 16
    found = predict(run, profile()).phases["log_probs"]
    cost = scoring_cost(run.models["actor"], run.config, work, Device(profile()))
    assert found == pytest.approx(cost.seconds)
    all_rows = run_of(1, *groups[::2], f"algorithm={{name: rloo, {update}}}")  # its KL is taken off the score
    assert found < predict(all_rows, profile()).phases["log_probs"]


def test_the_reshard_moves_what_the_plan_counts_over_the_link_between() -> None:
    run = run_of(4, *TP2, "rollout.tensor_parallel_size=1", "critic.ranks=0-3")
    device = Device(profile())
    moved = reshard_cost(run, device, 8, 1 << 20)
    plan = plan_reshard(run.actor.spec, run.actor.layout, run.rollout, bucket_elements=1 << 20)
    received = 4 * max(plan.received_elements(rank) for rank in range(4))
    assert received > 0
    inside = 0.5 + received / 1e4
    permuted = 16 * max(plan.permuted_elements(rank) for rank in range(4)) / 1e9
    assert moved.seconds == pytest.approx(inside + permuted, rel=1e-6)
    # with a rank a host it comes from another host
    far = reshard_cost(run, device, 1, 1 << 20)
    assert far.seconds == pytest.approx(2.0 + received / 1e3 + permuted, rel=1e-6)


def test_offloaded_state_goes_to_the_host_and_back() -> None:
    run = run_of(1, "actor.offload_optimizer=true")
    elements = 2 * 64 * 8 + 2 * (24 * 8 + 8 * 8 + 32 * 8 + 8 * 16 + 2 * 8) + 8
    device = Device(profile())
    assert offload_cost(run.actor, device).seconds == pytest.approx(2 * 8 * elements / 1e4)
    assert offload_cost(run.models["critic"], device).seconds == 0


def test_a_save_takes_the_disk_of_the_busiest_host_every_so_many_iterations() -> None:
    run = run_of(2, "checkpoint.save_interval=4")
    whole, one = (save_cost(run, Device(profile()), ranks) for ranks in (8, 1))
    assert whole.seconds > one.seconds  # a host with both ranks writes for both
    assert predict(run, profile()).phases["save"] == pytest.approx(whole.seconds / 4)
    assert "save" not in predict(placed(2), profile()).phases


def test_an_exchange_is_four_bytes_a_token_of_all_ranks() -> None:
    assert exchange_cost(100, 4, Device(profile())).seconds == pytest.approx(2 * 2 * 0.5 + 2 * 3 / 4 * 400 / 1e4)


def test_a_run_on_fixed_data_has_a_step_and_what_its_loss_asks_for(directory: Path) -> None:
    tree: dict[str, Any] = {
        "name": "small",
        "num_iterations": 1,
        "data": {"train": "train.jsonl", "batch_size": 8, "max_length": 10},
        "actor": {"model": "small", "dtype": "float32", "optimizer": {"lr": 1e-5}},
        "algorithm": {"name": "sft"},
    }
    (directory / "sft.yaml").write_text(yaml.safe_dump(tree))
    tree |= {"algorithm": {"name": "dpo"}, "reference": {"model": "small", "dtype": "float32"}}
    (directory / "dpo.yaml").write_text(yaml.safe_dump(tree))
    sft, dpo = (predict(place(load_config(f"{name}.yaml", []), 1), profile()).phases for name in ("sft", "dpo"))
    assert set(sft) == {"actor_update"}
    assert set(dpo) == {"log_probs", "reference", "actor_update"}
    assert dpo["actor_update"] > 1.9 * sft["actor_update"]  # two rows of a pair


# ------------------------------------------------------------------------------------------------ properties


LAYOUTS = {
    "dp": (4, ()),
    "tp": (4, (*TP2, "critic.tensor_parallel_size=2", "critic.sequence_parallel=true")),
    "pp": (4, ("actor.pipeline_parallel_size=2", "critic.pipeline_parallel_size=2", "actor.micro_batch_tokens=10")),
    "split": (4, SPLIT),
}
BETTER = {
    "products": {"float32": {"peak": 2e6}},
    "attention_forward": 2e5,
    "attention_backward": 1e5,
    "memory_bandwidth": 2e3,
    "elementwise_bandwidth": 2e5,
    "logits_forward": 2e4,
    "logits_backward": 1e4,
    "inside": {"bandwidth": 2e4, "latency": 0.5},
    "overheads": overheads(),
    "host_bandwidth": 2e4,
    "shared": {"products": 3.0, "memory": 1.5, "overhead": 2.0},
}
SLOW: dict[str, Any] = {
    "memory_bandwidth": 1e3,
    "overheads": overheads(
        operation=0.1, layer_forward=1.0, layer_backward=1.0, micro_batch=1.0, step=1.0, engine_step=1.0
    ),
}


@pytest.mark.parametrize("shared", [None, SHARED])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_better_device_is_never_slower(layout: str, shared: dict[str, float] | None) -> None:
    world_size, overrides = LAYOUTS[layout]
    run = placed(world_size, *overrides, "actor.offload_optimizer=true")
    before = predict(run, profile(**SLOW, shared=shared)).seconds
    for name, value in BETTER.items():
        if name != "shared" or shared is not None:
            after = predict(run, profile(**(SLOW | {"shared": shared, name: value}))).seconds
            assert after <= before * (1 + 1e-9), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_work_takes_longer(layout: str) -> None:
    world_size, overrides = LAYOUTS[layout]
    run = placed(world_size, *overrides)
    work = work_of(run.config, profile())
    before = predict(run, profile(), work).seconds
    for more in (replace(work, prompts=16), replace(work, prompt=9), replace(work, mean=5, longest=5)):
        assert predict(run, profile(), more).seconds > before
    shorter = replace(work, mean=2)
    assert predict(run, profile(), shorter).seconds < before


def test_ranks_that_share_processors_do_no_more_than_those(directory: Path) -> None:
    """Two ranks on one processor take as long as one: half of the rows each, at half of the speed."""
    alone = {"products": 1.0, "memory": 1.0, "overhead": 1.0}
    own = profile(shared=alone, inside={"bandwidth": 1e12, "latency": 0.0})
    one, two = (predict(placed(world_size), own).phases for world_size in (1, 2))
    for phase in ("log_probs", "reference", "reward", "values"):
        assert two[phase] == pytest.approx(one[phase], rel=1e-3)


# ------------------------------------------------------------------------------------------------ reports


def test_the_report_names_phases_idle_ranks_and_the_largest_batch() -> None:
    found = time_report(placed(4, *SPLIT), profile(memory_bytes=1 << 40))
    rows = {row["phase"]: row for row in found["phases"]}
    assert rows["critic_update"]["ranks"] == "2-3"
    assert rows["generate"]["ranks"] == "0-1"
    assert sum(row["share"] for row in found["phases"]) > 1  # some at the same time
    assert [row["ranks"] for row in found["idle"]] == ["0-1", "2-3"]
    assert found["prompt_tokens"], found["response_tokens"] == (6, {"mean": 4, "longest": 4})
    assert found["largest_batch"]["key"] == "data.prompts_per_iteration"


def test_the_largest_batch_is_the_last_that_the_forecast_says_fits() -> None:
    small = ("rollout.kv_cache_gib=1e-5", "rollout.max_num_seqs=1", "rollout.max_num_batched_tokens=1")
    run = placed(1, "algorithm.update.mini_batch_size=4", *small)
    sizes = {rows: _peak(place(_with_rows(run.config, rows), 1, cuda=False)) for rows in (8, 10, 12)}
    assert sizes[8] < sizes[10] < sizes[12]
    found = largest_batch(run, profile(memory_bytes=sizes[10]), cuda=False)
    assert (found["rows"], found["is_bound"]) == (10, True)
    assert largest_batch(run, profile(memory_bytes=sizes[12] - 1), cuda=False)["rows"] == 10
    assert largest_batch(run, profile(memory_bytes=1000), cuda=False)["rows"] is None
    budget = ("actor.micro_batch_tokens=10", "critic.micro_batch_tokens=10", "reference.micro_batch_tokens=10")
    budget += ("reward.models.0.micro_batch_tokens=10", "rollout.kv_cache_gib=0.001")
    endless = largest_batch(placed(1, *budget), profile(), cuda=False)
    assert not endless["is_bound"]


def test_shipped_configs_are_predicted_in_plausible_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layout of eight H100s runs four Llama-3-8B in a second, or takes ten minutes for 512 thousand tokens."""
    monkeypatch.chdir(ROOT)
    run = place(load_config("configs/llama3_8b_8gpus.yaml", []), 8, cuda=True)
    h100: DeviceProfile = load_profile("h100-sxm")
    slower = predict(run, load_profile("a100-80gb-sxm")).seconds
    assert 10 < predict(run, h100).seconds < slower < 120
