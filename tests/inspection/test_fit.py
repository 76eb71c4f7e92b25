"""Whether a config fits: every reason of its layout, and what it holds against what is free."""

import json

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.inspection.findings import Finding, Host
from hybridflow.inspection.fit import Free, fit_findings
from hybridflow.inspection.machine import GIB
from hybridflow.placement.forecast import forecast, memory_of
from hybridflow.placement.forecast import peaks as peaks_of
from hybridflow.placement.placed import PlacedModels, place
from tests.distributed.tiny_experiment import make_inputs, write_config

TWO = (Host("a", 0, (0,)), Host("b", 1, (1,)))
ONE = (Host("a", 0, (0, 1)),)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ExperimentConfig:
    directory = tmp_path_factory.mktemp("fit")
    path = write_config(directory / "config.yaml", make_inputs(directory / "inputs"))
    path.write_text(json.dumps(json.loads(path.read_text())))
    return ExperimentConfig.from_yaml(path, ["rollout.kv_cache_gib=2", "tensor_parallel_across_hosts=true"])


def peaks(run: PlacedModels) -> dict[int, tuple[int, str]]:
    return {each.rank: (each.bytes, each.moment) for each in peaks_of(memory_of(run), range(run.world_size))}


def named(findings: list[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.name == name]


def test_a_plan_that_fits(config: ExperimentConfig) -> None:
    findings = fit_findings(config, 2, ONE, Free({}, {"a": 8 * GIB}, {"a": 100 * GIB}))
    assert [finding.name for finding in findings] == ["layout", "memory", "checkpoints"]
    assert [finding.status for finding in findings] == ["ok"] * 3
    assert findings[0].value == "2 ranks: actor on 0-1, critic on 0-1, reference on 0-1, reward.models.0 on 0-1"
    assert findings[1].value.startswith("2 ranks there will hold 4.1 GiB, 8.0 GiB are available")


def test_engines_on_ranks_of_their_own_are_named(config: ExperimentConfig) -> None:
    tree = config.model_dump(mode="json")
    for role in (tree["actor"], tree["critic"], tree["reference"], *tree["reward"]["models"]):
        role["ranks"] = "0-1"
    tree["rollout"] |= {"ranks": "2-3", "max_staleness": 1}
    apart = ExperimentConfig.from_tree(tree, "apart")
    findings = fit_findings(apart, 4, (Host("a", 0, (0, 1, 2, 3)),), Free({}, {"a": 9 * GIB}, {"a": 100 * GIB}))
    assert findings[0].value.endswith("reward.models.0 on 0-1, engine on 2-3")
    assert {rank: moment for rank, (_, moment) in peaks(place(apart, 4)).items()} == {
        **dict.fromkeys((0, 1), "training"),
        **dict.fromkeys((2, 3), "generation"),
    }


def test_peaks_are_those_of_the_forecast(config: ExperimentConfig) -> None:
    run = place(config, 2)
    memory = forecast(run)["memory"]
    totals = {moment: report["worst_rank"]["total"] for moment, report in memory.items()}
    assert max(peaks(run).values()) == max((total, moment) for moment, total in totals.items())
    assert max(peaks(run).values())[1] == "generation"  # 2 GiB of KV cache


def test_a_layout_that_cannot_be_tells_every_reason(config: ExperimentConfig) -> None:
    findings = fit_findings(config, 3, ONE, Free({}, {"a": 8 * GIB}, {}))
    assert {finding.status for finding in findings} == {"fail"}
    assert len(findings) > 1 and all(finding.name == "layout" for finding in findings)
    assert any("actor" in finding.value and "3" in finding.value for finding in findings)
    assert "hybridflow.plan CONFIG --world-size 3" in findings[0].advice


def test_a_tensor_parallel_group_that_crosses_hosts(config: ExperimentConfig) -> None:
    within = config.model_copy(update={"tensor_parallel_across_hosts": False})
    findings = fit_findings(within, 2, TWO, Free({}, {}, {}))
    assert [finding.status for finding in findings] == ["fail", "fail"]
    assert findings[0].value.startswith("actor.tensor_parallel_size = 2: ranks 0-1 lie on a and b")
    assert fit_findings(within, 2, ONE, Free({}, {"a": 8 * GIB}, {}))[0].status == "ok"


@pytest.mark.parametrize(("available", "status"), [(7, "ok"), (5, "warn"), (4, "fail")])
def test_memory_is_that_of_all_ranks_of_a_host(config: ExperimentConfig, available: int, status: str) -> None:
    [found] = named(fit_findings(config, 2, ONE, Free({}, {"a": available * GIB}, {})), "memory")
    assert found.status == status
    assert ("rollout.kv_cache_gib" in found.advice) == (status != "ok")


def test_the_host_that_has_too_little_is_named(config: ExperimentConfig) -> None:
    found = named(fit_findings(config, 2, TWO, Free({}, {"a": 8 * GIB, "b": GIB}, {})), "memory")
    assert [(finding.host, finding.status) for finding in found] == [("a", "ok"), ("b", "fail")]
    assert found[1].advice.startswith("too little: less rollout.kv_cache_gib")


@pytest.mark.parametrize(("free", "status"), [(6, "ok"), (5, "warn"), (1, "fail")])
def test_a_gpu_is_asked_by_itself(config: ExperimentConfig, free: int, status: str) -> None:
    found = named(fit_findings(config, 2, TWO, Free({0: 80 * GIB, 1: free * GIB}, {}, {})), "GPU memory")
    assert [(finding.host, finding.status) for finding in found] == [("a", "ok"), ("b", status)]
    assert found[1].value.startswith("rank 1 will hold 2.1 GiB (generation), libraries 3.5 GiB (CUDA's context 0.50, ")


def test_too_small_a_disk_for_the_checkpoints(config: ExperimentConfig) -> None:
    [found] = named(fit_findings(config, 2, ONE, Free({}, {"a": 8 * GIB}, {"a": 1000})), "checkpoints")
    assert found.status == "warn" and "checkpoint.keep_last" in found.advice
    assert found.figures["needed_bytes"] == forecast(place(config, 2))["checkpoint"]["kept_bytes"] > 1000


def test_a_run_on_fixed_data_has_one_moment_and_no_engine(config: ExperimentConfig) -> None:
    tree = {
        "name": "run",
        "num_epochs": 2,
        "data": {"train": "rows.jsonl", "batch_size": 4, "max_length": 16},
        "reward_model": config.actor.model_dump(mode="json") | {"micro_batch_tokens": 64},
        "algorithm": {"name": "reward_model"},
        "checkpoint": {"save_interval": 1},
    }
    fixed = FixedDataConfig.model_validate(tree)
    findings = fit_findings(fixed, 2, ONE, Free({}, {"a": 8 * GIB}, {"a": 100 * GIB}))
    assert [(finding.name, finding.status) for finding in findings] == [
        ("layout", "ok"),
        ("memory", "ok"),
        ("checkpoints", "ok"),
    ]
    assert findings[0].value == "2 ranks: reward_model on 0-1"
    run = place(fixed, 2)
    assert {moment for _, moment in peaks(run).values()} == {"training"}
    told = forecast(run)
    assert told["checkpoint"]["num_kept"] == 3  # two, and the one being written
    assert "reshard" not in told and "rollout" not in told
