"""Two iterations under each of several sets of options, in one launch; the metrics of every iteration as JSON.

torchrun --nproc-per-node 2 -m tests.distributed.options_worker CONFIG OUT
"""

import json
import sys
from pathlib import Path

import torch

from hybridflow.parallel import platform as platforms
from hybridflow.recording.recorder import Recorder
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.engine_weights import differs_from_export, wrong_parameters

OFFLOADED = [f"{role}.offload_{what}=true" for role in ("actor", "critic") for what in ("optimizer", "gradients")]
BFLOAT16 = [
    "actor.dtype=bfloat16",
    "actor.sequence_parallel=true",
    "critic.dtype=bfloat16",
]  # main weights of their own
LOSS_TERMS = [
    "algorithm.kl={use: loss, estimator: k3, coef: 0.5}",
    "algorithm.policy.entropy_coef=0.01",
    "algorithm.policy={kind: dual_clip, dual_clip: 3.0}",
    "algorithm.policy.importance_cap=2.0",
    "algorithm.value_clip_range=null",
    "algorithm.update.epochs=2",
    "actor.optimizer.name=sgd",
    "actor.recompute=full",
    "critic.recompute=selective",
]
CONTEXT = ["actor.optimizer.lr=1e-3", "actor.tensor_parallel_size=1"] + [  # rows of more than 10 tokens are cut
    f"{role}.{key}" for role in ("actor", "critic") for key in ("context_parallel_size=2", "micro_batch_tokens=20")
]
OPTIONS = {
    "base": ["actor.optimizer.lr=1e-3"],
    "warmup": ["algorithm.critic_warmup_iterations=1", "actor.optimizer.schedule=cosine"],
    "adaptive": ["algorithm.kl={use: reward, coef: 0.1, controller: adaptive, target: 0.5, horizon: 100}"],
    "loss_terms": LOSS_TERMS,
    "scores": [
        "reward.functions.0={function: 'tests.distributed.reward_functions:length', weight: 0.5}",
        "reward.models.0.weight=2.0",
        "reward.truncation_penalty=3.0",
        "reward.normalization=running",
        "reward.clip_score=0.8",
    ],
    "sampling": [
        "sampling.samples_per_prompt=2",
        "sampling.temperature=0.7",
        "sampling.top_k=20",
        "sampling.repetition_penalty=1.1",
        "sampling.min_response_length=3",
        "sampling.stop=['+']",
    ],
    "bfloat16": BFLOAT16,
    "offloaded": ["actor.optimizer.lr=1e-3", *OFFLOADED],
    "bfloat16 offloaded": [*BFLOAT16, *OFFLOADED],
    "loss_terms offloaded": [*LOSS_TERMS, *OFFLOADED],
    "context": CONTEXT,
    "context offloaded": [*CONTEXT, *OFFLOADED],
}


def main(config: str, out: Path) -> None:
    records = {}
    for name, overrides in OPTIONS.items():
        trainer = OnlineTrainer.from_yaml(config, overrides)
        iterations = []
        for i in (1, 2):
            before = {k: x.clone() for k, (_, x) in trainer.roles.actor.weights().items()}
            done = trainer.iterate(i, 2, Recorder())
            moved = any(not torch.equal(before[k], x) for k, (_, x) in trainer.roles.actor.weights().items())
            fields = ("raw_scores", "scores", "truncated", "lengths", "prompt_lengths", "prompt_indices")
            iterations.append(
                {name: float(value) for name, value in done.metrics.items()}
                | {name: getattr(done.batch, name).tolist() for name in fields}
                | {"moved": moved}
            )
        with trainer.source.engine.awake():
            iterations[-1]["bytes_with_engine"] = [
                role.training_model.memory_bytes() for role in (trainer.roles.actor, trainer.roles.critic)
            ]
        if name.startswith("bfloat16"):
            iterations[-1]["wrong_parameters"] = wrong_parameters(trainer)
            iterations[-1]["differs_from_export"] = differs_from_export(trainer, out.with_suffix(".export"))
        records[name] = iterations
        trainer.generator.engine.close()
    if trainer.platform.rank == 0:
        out.write_text(json.dumps(records))
    platforms.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
