"""Whole runs on 8 ranks, with the collectives that CUDA would have, as far as a CPU can make them: one order."""

import json
from collections import Counter
from pathlib import Path

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.parallel.collective_order import findings, read
from hybridflow.placement.margin import GROUP, communicators
from hybridflow.placement.placed import place
from tests.checkpoint.kills import GROUPS, NO_KL, STALE, TP1, grpo
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.environments.rollouts_worker import TALK, named
from tests.environments.tiny_chat import make_chat_inputs, run_config
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

# dp 2 or more in each, and several buckets of gradients
EACH = ["reward.models.0.ranks=0-3", "rollout.reshard_bucket_mib=0.25"]
COMMON = [*GROUPS, *EACH]
ONE, STAGES = "num_iterations=1", "actor.pipeline_parallel_size=2"
MIXTURE = ["actor.model=ROOT/experts/policy", "actor.expert_parallel_size=4", "actor.token_dispatcher=alltoall"]
MIXTURE += ["sampling.samples_per_prompt=4", "algorithm.update.mini_batch_size=8"]
STALENESS = "rollout.max_staleness=1"
# name: config, what is changed
RUNS = {
    "dense": ["text", *COMMON, grpo(), ONE, STAGES],
    "mixture": ["text", *COMMON, grpo(), *NO_KL, ONE, *MIXTURE, TP1, "rollout.tensor_parallel_size=2"],
    "context": ["text", *COMMON, grpo(), *NO_KL, ONE, "actor.context_parallel_size=2", "actor.micro_batch_tokens=20"],
    "apart": ["text", *COMMON, grpo(**STALE), *NO_KL, STALENESS, "actor.ranks=0-3", "rollout.ranks=4-7"],
    "partial": [
        *("chat", named("Talk", arguments={"delay": 0.02}, **TALK), STALENESS, "rollout.partial={oversample: 1.5}"),
        *("actor.tensor_parallel_size=2", "rollout.tensor_parallel_size=4", "sampling.samples_per_prompt=2"),
    ],
}
PPO = ["text", *EACH, ONE, "algorithm.update.mini_batch_size=4", "sampling.samples_per_prompt=2"]
WEEKLY = {
    "staged-mixture": [*RUNS["mixture"], STAGES, "actor.tensor_parallel_size=2", "actor.sequence_parallel=true"],
    "staged-context": [*RUNS["context"], STAGES],
    "critic": [*PPO, "critic.pipeline_parallel_size=2"],
    "critic-beside": [*PPO, "actor.ranks=0-3", "critic.ranks=4-7", "critic.tensor_parallel_size=2"],
    "chunks": [*RUNS["dense"], "actor.virtual_pipeline_parallel_size=2", "actor.model=ROOT/deep/policy"],
}
ALL = RUNS | WEEKLY


@pytest.fixture(scope="module")
def records(cases: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("order")
    write_config(root / "text.yaml", make_inputs(root / "inputs"))
    make_chat_inputs(root / "chat")
    (root / "chat.yaml").write_text(json.dumps(run_config(root / "chat", max_response_length=48)))
    make_checkpoints(root / "experts", family="qwen3_moe", tied=False, head_dim=32)
    make_checkpoints(root / "deep", family="llama", tied=False, head_dim=32, num_layers=4)
    runs = {name: [each.replace("ROOT", str(root)) for each in own] for name, own in ALL.items() if name in cases}
    runs = {name: [str(root / f"{config}.yaml"), *own] for name, (config, *own) in runs.items()}
    run_ranks(8, "tests.distributed.order_worker", root / "records", json.dumps(runs))
    return root / "records"


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.cases(name)) for name in RUNS),
        *(pytest.param(name, marks=[pytest.mark.cases(name), pytest.mark.weekly]) for name in WEEKLY),
    ],
)
def test_all_ranks_have_one_order(name: str, records: Path) -> None:
    groups, calls = read(records / name)
    assert sorted(calls) == list(range(8))
    assert findings(groups, calls) == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.cases(name)) for name in ("dense", "mixture")])
def test_the_plan_counts_the_groups_that_send_what_lies_on_a_gpu(name: str, records: Path) -> None:
    """Each is used once before the engine is built, and then by the run; vLLM's and those of host memory beside."""
    config, *overrides = [each.replace("ROOT", str(records.parent)) for each in RUNS[name]]
    run = place(ExperimentConfig.from_yaml(records.parent / f"{config}.yaml", overrides), 8, cuda=True)
    groups, calls = read(records / name)
    own = {key: group.ranks for key, group in groups.items() if ":" not in group.description}  # vLLM's are tp:0, ...
    counts = Counter(
        own[call.group] for made in calls.values() for call in made if call.is_collective and call.group in own
    )
    several = {ranks for ranks, count in counts.items() if count > len(ranks)}
    planned = {ranks for whose, ranks, _ in communicators(run) if whose == GROUP and len(ranks) > 1}
    assert planned <= several, "each is used by the run, too"
    assert several - planned <= {tuple(range(8)), *run.rollout.replicas}, "what lies in host memory"


def test_two_groups_that_one_rank_enters_the_other_way_round_are_found(records: Path) -> None:
    one, other = (
        f"allreduce float32 [2] 0 of group {text}" for text in ("1 (first, ranks 0-3)", "2 (second, ranks 2-5)")
    )
    assert findings(*read(records / "swapped")) == [
        f"ranks can wait for each other: on rank 2 {one} comes before {other}; on rank 3 {other} comes before {one}"
    ]
