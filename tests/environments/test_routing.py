"""Routing replay where somebody answers the model: recorded experts beside HuggingFace with each token's weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridflow.checkpoint.store import step_name
from hybridflow.cli.convert import main as convert
from tests.agents import runs_worker as agents
from tests.checkpoint.kills import rows
from tests.environments.rollouts_worker import DYNAMIC, ONE, named
from tests.environments.tiny_chat import make_chat_inputs, run_config
from tests.environments.versions import rollout_of
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

NUM_ITERATIONS, NUM_LAYERS, CHOSEN = 3, 4, 2
TALK = named("Talk", arguments={"delay": 0.02}, max_turn_tokens=16, max_turns=5)
SEVERAL = agents.named("with_sub_agents", earlier_turns="branch", max_turn_tokens=12, arguments={"delay": 0.02})
STAGES = ["actor.pipeline_parallel_size=2", "rollout.pipeline_parallel_size=2", ONE]
APART = ["actor.ranks=0", "rollout.ranks=1", ONE]
STALE, PARTIAL = "rollout.max_staleness=1", "rollout.partial={oversample: 1.5}"
COMMON = [f"num_iterations={NUM_ITERATIONS}", "checkpoint.save_interval=1", "checkpoint.keep_last=9"]
COMMON += ["algorithm.policy.replay_routing=true", "sampling.samples_per_prompt=2", "actor.optimizer.lr=0.01"]
RUNS = {
    "classes": [TALK, ONE],
    "tp-2": [TALK, "actor.tensor_parallel_size=2"],
    "stages": [TALK, *STAGES],
    "sequences": [SEVERAL, ONE],
    "one-step-off": [TALK, STALE, *APART],
    "partial": [TALK, STALE, PARTIAL, ONE],
    "partial-sequences": [SEVERAL, STALE, PARTIAL, ONE],
    "dynamic": [TALK, DYNAMIC, ONE],
}
SYNCHRONOUS = ("classes", "tp-2", "stages", "sequences", "dynamic")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_experts": 16, "num_experts_per_tok": CHOSEN}
    root: Path = make_chat_inputs(
        tmp_path_factory.mktemp("routing"), family="qwen3_moe", num_layers=NUM_LAYERS, changes=changes
    )
    (root / "config.yaml").write_text(json.dumps(run_config(root, max_response_length=128)))
    runs = {name: [*COMMON, *overrides] for name, overrides in RUNS.items()}
    run_ranks(2, "tests.flows.one_step_off_worker", root / "config.yaml", json.dumps(runs))
    return root


@pytest.mark.parametrize("name", RUNS)
def test_each_token_has_the_experts_of_the_weights_that_read_it(name: str, root: Path, tmp_path: Path) -> None:
    """Of each sequence up to the model's last token; what stands behind that token has none."""
    run, models, ages, num_differ = root / "runs" / name, {}, set[int](), 0
    for iteration in range(1, NUM_ITERATIONS + 1):
        batch = rollout_of(run, iteration)
        found = load_file(run / "batches" / f"iteration_{iteration:06d}.safetensors")["routed_experts"].long()
        versions = torch.full_like(batch.input_ids, iteration - 1) if batch.versions is None else batch.versions[:, 0]
        parts = (
            x.split(batch.branch_lengths.tolist()) for x in (batch.input_ids, found, versions, batch.response_mask)
        )
        for ids, experts, version, by_model in zip(*parts, strict=True):
            assert len(ids) == len(experts)
            sampled = by_model.nonzero().flatten()
            read = int(sampled[-1]) if len(sampled) else 0
            assert not experts[read:].any()
            of_next = version[sampled[torch.searchsorted(sampled, torch.arange(read), right=True)]]
            for number in of_next.unique().tolist():
                chosen = choices(models, number, run, tmp_path, ids)[:read]
                some = of_next == number
                assert torch.equal(experts[:read][some].sort().values, chosen[some]), (iteration, number)
                first = choices(models, 0, run, tmp_path, ids)[:read]
                ages.add(iteration - 1 - number)
                num_differ += bool((first != chosen).any())
    assert num_differ, "versions choose other experts"
    assert ages == ({0} if name in SYNCHRONOUS else {0, 1})


def choices(
    models: dict[int, torch.nn.Module], version: int, run: Path, directory: Path, ids: torch.Tensor
) -> torch.Tensor:
    """(tokens, layers, k) sorted experts of a HuggingFace model with the weights of a version."""
    if version not in models:
        path = run.parent.parent / "policy"
        if version:
            path = directory / str(version)
            convert(["megatron-to-hf", str(run / "checkpoints" / step_name(version) / "actor"), str(path)])
        models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = models[version](ids[None], output_router_logits=True).router_logits
    return torch.stack([layer.topk(CHOSEN).indices.sort().values for layer in logits], dim=1)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_trainer_replays_them_in_each_sequence(name: str, root: Path) -> None:
    """In float32 the trainer chooses the same; experts of another token would change its log-probs."""
    metrics = rows(root / "runs" / name)
    assert len(metrics) == NUM_ITERATIONS
    assert all(float(row["rollout/experts_differ"]) == 0 for row in metrics)
    assert all(float(row["rollout/log_prob_diff_max"]) < 1e-3 for row in metrics)
