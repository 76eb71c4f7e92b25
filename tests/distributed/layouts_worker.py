"""The responses of every rollout layout to the same prompts, one trainer after the other, before any update.

torchrun --nproc-per-node 4 -m tests.distributed.layouts_worker CONFIG OUT [OVERRIDE ...]
"""

import sys
from pathlib import Path

import torch

from hybridflow.parallel import platform as platforms
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.waiting_worker import scored_by_new_weights, scored_in_all_ways

NUM_RANKS = 4
PROMPTS = [0, 1, 2, 3, 4, 5]
TP1, TP2 = ("actor.tensor_parallel_size=1",), ("actor.tensor_parallel_size=2",)
ROLLOUT_TP2, ROLLOUT_PP2 = "rollout.tensor_parallel_size=2", "rollout.pipeline_parallel_size=2"
CP2 = [  # ranks share the tokens of rows longer than 10
    f"{role}.{key}" for role in ("actor", "reference") for key in ("context_parallel_size=2", "micro_batch_tokens=20")
]
LAYOUTS = {
    "one replica": (*TP1, "actor.ranks=3"),
    "two replicas": (*TP1, "actor.ranks=0,2"),
    "four replicas": TP1,
    "tp2": TP2,
    "tp1 of tp2": (*TP2, "rollout.tensor_parallel_size=1"),
    "pp2": (*TP1, ROLLOUT_PP2),
    "tp2 pp2": (*TP2, ROLLOUT_PP2),
    "cp2": (*TP1, *CP2, ROLLOUT_TP2),
    "tp2 on its own ranks": (*TP1, "actor.ranks=0-1", "rollout.ranks=2-3", ROLLOUT_TP2),
}
SCORED = ("one replica", "four replicas", "tp2", "cp2")
FUNCTIONS = "tests.distributed.reward_functions"
SCORES = (
    f"reward.functions=[{{function: '{FUNCTIONS}:beside_the_others', per: group}}, "
    f"{{function: '{FUNCTIONS}:in_main_thread'}}, "
    f"{{function: '{FUNCTIONS}:later', background: false}}, {{function: '{FUNCTIONS}:share', per: batch}}]",
    "data.prompts_per_iteration=3",  # of four replicas one has none, and prompts are cut for four data-parallel ranks
)


def main(config: str, out: Path, overrides: list[str]) -> None:
    results = {}
    for name, layout in LAYOUTS.items():
        trainer = OnlineTrainer.from_yaml(config, [*overrides, *layout, *SCORES])
        prompts = trainer.inputs.train.batch(PROMPTS)
        samples = trainer.config.sampling.samples
        with trainer.source.engine.awake():
            sampled = trainer.generator.generate(prompts, samples_per_prompt=samples, iteration=1, first_prompt=0)
        results[name] = {
            "sampled": vars(sampled),
            "greedy": vars(trainer.source.engine.greedy_responses(prompts)),
            "replicas": trainer.generator.layout.replicas,
        }
        if name in SCORED:
            results[name]["scored"] = scored_in_all_ways(trainer)
        if name == "four replicas":
            results[name]["kl"] = scored_by_new_weights(trainer)
        if trainer.generator.engine is not None:
            trainer.generator.engine.close()
    if trainer.platform.rank == 0:
        torch.save(results, out)
    platforms.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
