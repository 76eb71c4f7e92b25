"""Runs whose first steps tell their own old log-probs, beside the same with a forward pass for all of them.

torchrun --nproc-per-node 4 -m tests.flows.first_step_worker CONFIG OUT
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hybridflow.batch import RolloutBatch
from hybridflow.config import ExperimentConfig
from hybridflow.errors import NonFiniteError
from hybridflow.flows import run as flows_run
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.agreement import digest_tensors
from hybridflow.parallel.exchange import PartialTensor
from hybridflow.recording.recorder import record_run
from hybridflow.roles import policy
from hybridflow.roles.policy import Actor
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.waiting_worker import asked, gathered

NUM_ITERATIONS = 2
BY_THE_CLOCK = ("time/", "speed/", "memory/", "seconds", "per_sec", "_ms")
SGD = "actor.optimizer={name: sgd, lr: 0.01}"  # Adam makes steps of size lr out of differences of rounding
TP1, TP2 = "actor.tensor_parallel_size=1", "actor.tensor_parallel_size=2"
PP2 = (TP1, "actor.pipeline_parallel_size=2")
GROUPS = ("critic=null", "reference.tensor_parallel_size=1", "sampling.samples_per_prompt=2")
CRITIC = "critic.tensor_parallel_size=2"
LETTERS = "reward={functions: [{function: 'tests.distributed.reward_functions:num_letters'}]}"


def grpo(update: str, more: str = "") -> str:
    return f"algorithm={{name: grpo, kl: {{use: loss, coef: 0.1, estimator: k2}}, update: {{{update}}}{more}}}"


PPO = (
    "algorithm={name: ppo, kl: {use: loss, coef: 0.1, estimator: k2}, update: {mini_batch_size: 2}, "
    "critic_warmup_iterations: 1}"
)
HALF, ALL = "mini_batch_size: 4", "epochs: 1"  # of 8 rows
# what each iteration has in its first mini-batch, of how many rows; whether units are run while others generate
CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "one step": ((8, 8), (TP1, *GROUPS, grpo(ALL))),
    "two steps": ((4, 4), (TP1, *GROUPS, grpo(HALF))),
    "two steps while waiting": ((4, 4), (TP1, *GROUPS, grpo(HALF))),
    "whole prompts while waiting": ((2, 2), (TP2, *GROUPS, grpo("mini_batch_size: 2, whole_prompts: true"))),
    "two epochs, stages": ((2, 2), (*PP2, *GROUPS, grpo("mini_batch_size: 2, epochs: 2"))),
    "an importance weight, tensors": ((4, 4), (TP2, *GROUPS, grpo(HALF, ", policy: {importance: {cap: 2.0}}"))),
    "dynamic sampling": (
        (4, 4),
        (TP1, *GROUPS, LETTERS, grpo(HALF, ", dynamic_sampling: {max_generation_rounds: 2}")),
    ),
    "sampled and greedy": (
        (4, 4),
        (TP1, *GROUPS, f"algorithm={{name: remax, kl: {{use: loss, coef: 0.1, estimator: k2}}, update: {{{HALF}}}}}"),
    ),
    "a critic, warmed up": ((0, 2), (TP2, CRITIC, PPO)),
    "the KL is in the reward": ((0, 0), (TP2, CRITIC, "algorithm.update={mini_batch_size: 2}")),
}


def main(config: Path, out: Path) -> None:
    records = {}
    for case, (_, overrides) in CASES.items():
        ways = {}
        for way, tells in {"told": flows_run.defers_old_log_probs, "computed": lambda *_: False}.items():
            name = f"{case} {way}".replace(" ", "_").replace(",", "")
            with patch.object(flows_run, "defers_old_log_probs", tells):
                ways[way] = iterations(ExperimentConfig.from_yaml(config, [f"name={name}", SGD, *overrides]), case)
        records[case] = compared(ways["told"], ways["computed"])
    records["not finite"] = not_finite(ExperimentConfig.from_yaml(config, ["name=bad", *CASES["two steps"][1]]))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(records))
    platforms.stop()


def iterations(config: ExperimentConfig, case: str) -> dict[str, Any]:
    """What the run does, and how many tokens the actor has made a forward pass for, in each iteration."""
    trainer = OnlineTrainer(config)
    found: dict[str, Any] = {"batches": [], "metrics": [], "computed": [], "first": []}
    waiting = "all compute ahead" if case.endswith("while waiting") else "by timing alone"
    with record_run(config, NUM_ITERATIONS, rank=trainer.platform.rank, decode=trainer.inputs.decode) as recorder:
        for iteration in range(1, NUM_ITERATIONS + 1):
            with counted() as counts, asked(waiting):
                done = trainer.iterate(iteration, NUM_ITERATIONS, recorder)
            assert done is not None, "no number is not finite"
            found["batches"].append(done.batch.tensors())
            found["metrics"].append({name: float(x) for name, x in done.metrics.items()})
            found["computed"].append(sum(gathered(trainer, float(sum(counts)))))
            found["first"].append(first_mini_batch_tokens(trainer, done.batch))
    found["weights"] = {name: x.clone() for name, (_, x) in trainer.roles.actor.weights().items()}
    if trainer.generator.engine is not None:
        trainer.generator.engine.close()
    return found


def not_finite(config: ExperimentConfig) -> dict[str, Any]:
    """What is said where log-probs are NaN in the first step alone, and whether a weight has moved."""
    trainer = OnlineTrainer(config)
    before = {name: x.clone() for name, (_, x) in trainer.roles.actor.weights().items()}
    computed = policy._log_probs_and_entropy

    def poisoned(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = computed(*args)
        return (log_probs * torch.nan if log_probs.requires_grad else log_probs), entropy

    with (
        patch.object(policy, "_log_probs_and_entropy", poisoned),
        record_run(config, 1, rank=trainer.platform.rank, decode=trainer.inputs.decode) as recorder,
        pytest.raises(NonFiniteError) as raised,
    ):
        trainer.iterate(1, 1, recorder)
    after = trainer.roles.actor.weights()
    return {
        "error": str(raised.value),
        "row": int(trainer.book.rows["actor"][0].min()),
        "moved": any(not torch.equal(before[name], x) for name, (_, x) in after.items()),
    }


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The log-probs of each pass of this rank, those that it contributes."""
    found: list[int] = []
    log_probs = Actor.log_probs

    def noted(self: Actor, *args: Any) -> PartialTensor:
        made = log_probs(self, *args)
        if not self._alone:  # what was run ahead is in what is asked for later
            found.append(len(made.where))
        return made

    with patch.object(Actor, "log_probs", noted):
        yield found


def first_mini_batch_tokens(trainer: OnlineTrainer, batch: RolloutBatch) -> int:
    rows = trainer.book.rows["actor"]
    return batch.select(rows[0]).num_response_tokens if rows else 0


def compared(told: dict[str, Any], computed: dict[str, Any]) -> dict[str, Any]:
    """The largest difference of what both have, and what each has computed."""

    def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
        assert one.keys() == other.keys()
        return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)

    return {
        "batches": [largest(*pair) for pair in zip(told["batches"], computed["batches"], strict=True)],
        "weights": largest(told["weights"], computed["weights"]),
        "digests": [digest_tensors(batch).hex() for batch in told["batches"]],
        "moved": told["metrics"][-1]["actor/grad_norm"],
        "approx_kl": [metrics.get("actor/approx_kl") for metrics in told["metrics"]],
        "tokens": [int(batch["response_mask"].sum()) for batch in told["batches"]],
        "first": told["first"],
        "computed": {way: each["computed"] for way, each in {"told": told, "computed": computed}.items()},
        "metrics": [
            [sorted(metrics[0].keys() ^ metrics[1].keys()), differing(*metrics)]
            for metrics in zip(told["metrics"], computed["metrics"], strict=True)
        ],
    }


def differing(one: dict[str, float], other: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Metrics that depend on no clock and are not alike to 1e-4 of themselves, or to 2e-5."""
    steady = [name for name in one.keys() & other.keys() if not any(mark in name for mark in BY_THE_CLOCK)]
    return {
        name: (one[name], other[name])
        for name in sorted(steady)
        if not abs(one[name] - other[name]) <= 2e-5 + 1e-4 * abs(other[name])
    }


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
