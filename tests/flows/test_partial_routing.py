"""Partial rollouts of a mixture of experts: the experts that are replayed are those of each segment's weights."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.checkpoint.store import step_name
from hybridflow.cli.convert import main as convert
from tests.checkpoint.kills import rows
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.flows.test_one_step_off import batch
from tests.flows.test_partial import COMMON, TP1
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

pytestmark = pytest.mark.distributed

NUM_ITERATIONS, NUM_LAYERS, CHOSEN, NUM_EXPERTS = 5, 4, 2, 16
REPLAY = "algorithm.policy.replay_routing=true"
STAGES = ["actor.pipeline_parallel_size=2", "actor.tensor_parallel_size=1", "rollout.pipeline_parallel_size=2"]
MORE = ["reference=null", "algorithm.kl.use=none", "actor.optimizer.lr=0.01", "sampling.max_response_length=32"]
MORE += ["sampling.stop_token_ids=" + json.dumps(list(range(10, 35)))]  # so that lengths differ
RUNS = {
    "two-replicas": [TP1, REPLAY],
    "again": [TP1, REPLAY],
    "tp2": [REPLAY],
    "stages": [TP1, REPLAY, *STAGES],
    "own": [TP1],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("partial")
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
    runs = {name: [*COMMON, *MORE, *more] for name, more in RUNS.items()}
    run_ranks(2, "tests.flows.one_step_off_worker", config, json.dumps(runs))
    return root


def choices(model: torch.nn.Module, found: dict[str, torch.Tensor]) -> torch.Tensor:
    """(T, layers, k) sorted experts of a HuggingFace model."""
    parts = []
    for ids in found["input_ids"].split(found["lengths"].tolist()):
        with torch.no_grad():
            logits = model(ids[None], output_router_logits=True).router_logits
        parts.append(torch.stack([layer.topk(CHOSEN).indices.sort().values for layer in logits], dim=1))
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["two-replicas", "tp2", "stages"])
def test_a_token_has_the_experts_of_the_weights_that_chose_the_next_token(
    name: str, root: Path, tmp_path: Path
) -> None:
    """Also the last token before a cut, and of a row's prefix nothing that later weights have chosen."""
    models, num_mixed, num_differ = {}, 0, 0
    for iteration in range(1, NUM_ITERATIONS + 1):
        found = batch(root / name, iteration)
        experts, versions, mask = found["routed_experts"].long(), found["versions"][:, 0], found["response_mask"]
        of_next = torch.cat([versions[1:], versions[:1]])
        ends = torch.zeros_like(mask).index_fill(0, found["lengths"].cumsum(0) - 1, True)
        for start, length, first in zip(
            (found["lengths"].cumsum(0) - found["lengths"]).tolist(),
            found["lengths"].tolist(),
            found["prompt_lengths"].tolist(),
            strict=True,
        ):
            of_next[start : start + first - 1] = versions[start + first]  # a prompt's are the first segment's
            num_mixed += len(versions[start + first : start + length].unique()) > 1
        assert (experts[ends] == 0).all()
        for version in of_next[~ends].unique().tolist():
            if version not in models:
                path = root / "inputs" / "policy"
                if version:
                    path = tmp_path / str(version)
                    convert(
                        ["megatron-to-hf", str(root / name / "checkpoints" / step_name(version) / "actor"), str(path)]
                    )
                models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            some = (of_next == version) & ~ends
            expected = choices(models[version], found)
            assert torch.equal(experts[some].sort().values, expected[some]), (iteration, version)
            num_differ += int((expected != choices(models[0], found))[some].any())
    assert num_mixed >= 2 and num_differ, "there are rows of several segments, and versions choose other experts"


def test_it_repeats_and_differs_from_a_run_without_replay_in_last_digits_alone(root: Path) -> None:
    assert rows(root / "again") == rows(root / "two-replicas")
    ours, theirs = batch(root / "own", 1), batch(root / "two-replicas", 1)
    assert torch.equal(ours["input_ids"], theirs["input_ids"]) and "routed_experts" not in ours
    assert all(float(row["rollout/experts_differ"]) >= 0 for row in rows(root / "two-replicas"))
