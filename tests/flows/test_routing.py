"""Whole runs of a mixture of experts in bfloat16: with the engine's experts log-probs are nearer to the engine's."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.flows.routing_worker import RUNS
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

NUM_LAYERS, CHOSEN, NUM_EXPERTS = 4, 2, 16
DIFFERENCE = "rollout/log_prob_diff_mean"
pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("routing")
    inputs = make_inputs(root / "inputs")
    make_checkpoints(
        inputs,
        family="qwen3_moe",
        tied=False,
        head_dim=32,
        num_layers=NUM_LAYERS,
        changes={"num_experts": NUM_EXPERTS, "num_experts_per_tok": CHOSEN},
    )
    config = write_config(root / "config.yaml", inputs)
    tree = json.loads(config.read_text())
    del tree["critic"], tree["reference"]
    tree["actor"] |= {"dtype": "bfloat16", "recompute": "full", "optimizer": {"lr": 1e-4}, "sequence_parallel": True}
    tree["algorithm"] = {"name": "grpo", "kl": {"use": "none"}, "update": {"mini_batch_size": 8}}
    tree["sampling"] = {"max_response_length": 16, "samples_per_prompt": 4, "ignore_eos": True}
    tree["reward"] = {"models": [{"model": str(inputs / "reward"), "dtype": "float32"}]}
    config.write_text(json.dumps(tree))
    run_ranks(2, "tests.flows.routing_worker", config, root / "results.json")
    return root


@pytest.fixture(scope="module")
def results(runs: Path) -> dict[str, Any]:
    return json.loads((runs / "results.json").read_text())


def test_the_engines_experts_bring_log_probs_nearer(results: dict[str, Any]) -> None:
    own, replayed = results["own"], results["replayed"]
    for name in ("own", "replayed", "stages", "two replicas", "groups that differ"):  # pytest -s shows them
        print(name, [[metrics.get(key) for key in (DIFFERENCE, "rollout/experts_differ")] for metrics in results[name]])
    for ours, theirs in zip(own, replayed, strict=True):
        assert theirs[DIFFERENCE] < ours[DIFFERENCE]
        assert 0 < theirs["rollout/experts_differ"] < 0.2


def test_a_layer_that_is_computed_again_counts_once(results: dict[str, Any]) -> None:
    """In the first iteration: what is computed again has other last digits in its gradients."""
    again, once = results["replayed"][0], results["activations kept"][0]
    for name in ("rollout/experts_differ", DIFFERENCE):
        assert again[name] == once[name]


@pytest.mark.parametrize("name", RUNS)
def test_only_with_the_key_is_anything_recorded(name: str, results: dict[str, Any], runs: Path) -> None:
    dumped = load_file(runs / name.replace(" ", "-") / "batches" / "iteration_000001.safetensors")
    for metrics in results[name]:
        assert metrics["layers"] == (0 if name == "own" else NUM_LAYERS)
        assert ("rollout/experts_differ" in metrics) == (name != "own")
    assert ("routed_experts" in dumped) == (name != "own")
    if name != "own":
        experts, lengths = dumped["routed_experts"], dumped["lengths"]
        assert experts.shape == (int(lengths.sum()), NUM_LAYERS, CHOSEN) and experts.dtype == torch.uint8
        recorded = experts[..., 0] != experts[..., 1]
        last = torch.zeros(len(experts), dtype=torch.bool).index_fill(0, lengths.cumsum(0) - 1, True)
        assert recorded[~last].all() and not recorded[last].any()


def test_a_record_crosses_once_for_two_epochs_of_two_mini_batches(results: dict[str, Any]) -> None:
    """From the engine's rank to the row's owner, in the one exchange of the iteration."""
    for metrics in results["two epochs"]:
        assert metrics["messages"] == 1
        assert 0 < metrics["crossed"] < metrics["tokens"] * NUM_LAYERS * CHOSEN, "some rows are where they were made"
    assert all(metrics["messages"] == metrics["crossed"] == 0 for metrics in results["two epochs own"])


def test_with_dynamic_sampling_records_travel_when_the_batch_is_chosen(results: dict[str, Any]) -> None:
    """Once, of however many rounds the batch is; a dump is one exchange more."""
    assert any(metrics["rollout/generation_rounds"] > 1 for metrics in results["groups that differ"])
    for metrics in results["groups that differ"]:
        assert metrics["messages"] == 2


def test_a_resumed_run_has_the_experts_of_groups_from_before(runs: Path, results: dict[str, Any]) -> None:
    assert results["groups that differ"][0]["rollout/groups_surplus"] > 0
    whole, resumed = (sorted((runs / name / "batches").iterdir()) for name in ("groups-that-differ", "groups-resumed"))
    assert len(whole) == len(resumed) == len(results["groups that differ"]) > len(results["groups resumed"])
    for ours, theirs in zip(whole, resumed, strict=True):
        expected, found = load_file(ours), load_file(theirs)
        assert "routed_experts" in expected and expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("name", RUNS)
def test_the_load_of_experts(name: str, results: dict[str, Any], runs: Path) -> None:
    """With replay and without, also where no pass for old log-probs runs; a row an iteration in the file."""
    rows = list(csv.DictReader((runs / name.replace(" ", "-") / "experts_load.csv").open()))
    assert [row.pop("iteration") for row in rows] == [str(i + 1) for i in range(len(results[name]))]
    for metrics, row in zip(results[name], rows, strict=True):
        assert list(row) == [f"layer_{layer}" for layer in range(NUM_LAYERS)]
        load = [float(value) for value in row.values()]
        assert metrics["rollout/experts_load_max_over_mean"] == pytest.approx(sum(load) / NUM_LAYERS)
        assert metrics["rollout/experts_load_worst_layer"] == max(load)
        assert min(load) > 1 and max(load) < NUM_EXPERTS / CHOSEN
    if name not in (
        "own",
        "stages",
        "two replicas",
        "groups that differ",
    ):  # the engine's experts are the same, whoever counts them
        first = results["replayed"][0]["rollout/experts_load_max_over_mean"]
        assert results[name][0]["rollout/experts_load_max_over_mean"] == first


def test_the_load_is_that_of_a_dumped_batch(results: dict[str, Any], runs: Path) -> None:
    """Of all tokens but a row's last, on two replicas."""
    dumped = load_file(runs / "two-replicas" / "batches" / "iteration_000001.safetensors")
    experts = dumped["routed_experts"].long()
    kept = torch.ones(len(experts), dtype=torch.bool).index_fill(0, dumped["lengths"].cumsum(0) - 1, False)
    counts = torch.stack(
        [experts[kept, layer].flatten().bincount(minlength=NUM_EXPERTS) for layer in range(NUM_LAYERS)]
    )
    load = counts.max(1).values / counts.double().mean(1)
    metrics = results["two replicas"][0]
    assert metrics["rollout/experts_load_worst_layer"] == pytest.approx(float(load.max()))
    assert metrics["rollout/experts_load_max_over_mean"] == pytest.approx(float(load.mean()))


def test_a_kept_rollout_has_them(results: dict[str, Any], runs: Path) -> None:
    """A start that ends in its first iteration, and the next one, which generates only the second."""
    assert results["stopped"].startswith("Stopped")
    first, second = results["kept"]
    assert "rollout/throughput_tokens_per_sec" not in first and "rollout/throughput_tokens_per_sec" in second
    for name in (DIFFERENCE, "rollout/experts_differ", "actor/loss", "actor/grad_norm"):
        assert [metrics[name] for metrics in results["kept"]] == [metrics[name] for metrics in results["replayed"]]


def test_a_dumped_batch_has_them(results: dict[str, Any]) -> None:
    for name in (DIFFERENCE, "rollout/experts_differ", "actor/loss", "actor/grad_norm"):
        assert [metrics[name] for metrics in results["again"]] == [metrics[name] for metrics in results["replayed"]]
    assert results["without experts"].startswith("DataError") and "replay_routing" in results["without experts"]
    assert all(metrics["layers"] == 0 for metrics in results["experts not asked for"])
