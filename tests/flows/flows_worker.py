"""One trainer after the other, each with another flow or another fault; what came of it as JSON.

torchrun --nproc-per-node 2 -m tests.flows.flows_worker INPUTS CONFIG OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from hybridflow.config import ExperimentConfig
from hybridflow.errors import UserError
from hybridflow.models.memory import live_bytes
from hybridflow.parallel import platform as platforms
from hybridflow.recording.recorder import record_run
from hybridflow.trainers.online import OnlineTrainer
from hybridflow.user_code import search_beside
from tests.distributed.tiny_experiment import make_uneven_prompts
from tests.launch import ROOT

NO_CRITIC = ["critic=null", "reference=null"]
NO_REWARD = [*NO_CRITIC, "reward=null"]


BEST_OF_N = {"name": "custom", "flow": "best_of_n:best_of_n", "roles": ["actor", "reward"], "options": {"keep": 1}}


LETTERS = "reward={functions: [{function: 'tests.distributed.reward_functions:num_letters'}]}"
# algorithms without a critic, and what else they have not
CRITIC_FREE = {
    "dr_grpo": ("reference",),
    "rloo": (),
    "opo": ("reference",),
    "maxrl": ("reference",),
    "remax": (),
    "reinforce": (),
}


DISTILL = ["critic=null", "reward=null", "algorithm={name: distill, gamma: 0.5}"]


def critic_free(name: str, *absent: str) -> list[str]:
    """One step an iteration, scores of a function."""
    nothing = [f"{role}=null" for role in ("critic", *absent)]
    return ["sampling.samples_per_prompt=2", LETTERS, *nothing, f"algorithm={{name: {name}}}"]


def custom(name: str, *roles: str, **more: Any) -> str:
    return "algorithm=" + json.dumps(
        {"name": "custom", "flow": f"tests.flows.flows:{name}", "roles": ["actor", *roles], **more}
    )


def main(inputs: Path, config: Path, out: Path) -> None:
    records: dict[str, Any] = {}
    search_beside(ROOT / "configs" / "best_of_n.yaml")
    for name, overrides in cases(inputs).items():
        try:
            trainer = OnlineTrainer(ExperimentConfig.from_yaml(config, [f"name={name}", *overrides]))
        except UserError as error:
            records[name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        records[name] = iterate(trainer)
        records[name]["bytes"] = bytes_held(trainer)
        trainer.generator.engine.close()
    if trainer.platform.rank == 0:
        out.write_text(json.dumps(records))
    platforms.stop()


def cases(inputs: Path) -> dict[str, list[str]]:
    grpo = ["sampling.samples_per_prompt=2", "critic=null"]
    return {
        "ppo": [],
        "ppo_without_kl": ["reference=null", "algorithm.kl.use=none"],
        "grpo": [*grpo, "algorithm={name: grpo, update: {mini_batch_size: 4}}"],
        "grpo_without_kl": [
            *grpo,
            "reference=null",
            "algorithm={name: grpo, kl: {use: none}, update: {mini_batch_size: 4}}",
        ],
        "by_length": [
            *grpo,
            "reference=null",
            f"data.train={make_uneven_prompts(inputs / 'uneven.jsonl')}",
            "sampling.by_prompt_length=[{up_to: 5, samples_per_prompt: 3}, {up_to: 8, temperature: 0.7}]",
            "algorithm={name: grpo, kl: {use: none}, update: {mini_batch_size: 4}}",
        ],
        **{name: critic_free(name, *roles) for name, roles in CRITIC_FREE.items()},
        "distill": DISTILL,
        "engine_log_probs": [*critic_free("dr_grpo", "reference"), "algorithm.policy.old_log_probs=engine"],
        "negative_scores": [*critic_free("maxrl", "reference"), "reward.functions.0.weight=-1.0"],
        "raises": [*NO_REWARD, custom("raises")],
        "returns_nothing": [*NO_REWARD, custom("returns_nothing")],
        "wants_a_critic": [*NO_REWARD, custom("wants_a_critic")],
        "bad_loss": [*NO_REWARD, custom("bad_loss")],
        "bad_loss_skipped": [*NO_REWARD, custom("bad_loss"), "nonfinite={action: skip, max_in_a_row: 2}"],
        "infinite_gradient": [*NO_REWARD, custom("infinite_gradient")],
        "bad_reward": [f"reward.models.0.model={inputs / 'bad_reward'}"],
        "headless_reward": [f"reward.models.0.model={inputs / 'headless_reward'}"],
        "bad_policy": [f"actor.model={inputs / 'bad_policy'}"],
        "best_of_n": [*NO_CRITIC, "sampling.samples_per_prompt=3", f"algorithm={json.dumps(BEST_OF_N)}"],
        "sampled_and_greedy": [*NO_REWARD, custom("sampled_and_greedy"), "sampling.samples_per_prompt=2"],
        "sampled_again": [*NO_REWARD, custom("sampled_again")],
        "products": [*NO_REWARD, custom("products")],
        "few_rows": [*NO_REWARD, custom("few_rows"), "actor.tensor_parallel_size=1"],
        "no_response": [*NO_REWARD, custom("no_response")],
    }


def iterate(trainer: OnlineTrainer) -> dict[str, Any]:
    """Three iterations at most; the metrics of each, the error, whether the weights moved in each."""
    record: dict[str, Any] = {"metrics": [], "moved": [], "mini_batches": []}
    rank = trainer.platform.rank
    try:
        with record_run(trainer.config, 3, rank=rank, decode=trainer.inputs.decode) as recorder:
            for iteration in (1, 2, 3):
                before = {k: x.clone() for k, (_, x) in trainer.roles.actor.weights().items()}
                try:
                    done = trainer.iterate(iteration, 3, recorder)
                finally:
                    weights = trainer.roles.actor.weights()
                    record["moved"].append(any(not torch.equal(before[k], x) for k, (_, x) in weights.items()))
                    record["finite"] = all(bool(x.isfinite().all()) for _, x in weights.values())
                if done is not None:
                    record["metrics"].append({name: float(x) for name, x in done.metrics.items()})
                    record["hand_offs"] = len(trainer.generator.costs)
                    record["mini_batches"].append([len(rows) for rows in trainer.book.rows["actor"]])
                    record["fields"] = sorted(done.batch.tensors())
    except UserError as error:
        record["error"] = f"{type(error).__name__}: {error}"
    return record


def bytes_held(trainer: OnlineTrainer) -> dict[str, int]:
    """Of the weights of each role that there is, on this rank."""
    roles = {name: getattr(trainer.roles, name) for name in ("actor", "critic", "reference")}
    return {
        name: live_bytes(p.data for chunk in role.chunks for p in chunk.parameters())
        for name, role in roles.items()
        if role is not None
    }


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
