"""Generate, score and train for an iteration, by each of several configs; save what comes of each.

torchrun --nproc-per-node 1 -m tests.distributed.overrides_worker OUT CONFIG ...
"""

import sys
from pathlib import Path

import torch

from hybridflow import RLTrainer


def main(out: Path, configs: list[str]) -> None:
    for config in configs:
        trainer = RLTrainer.from_yaml(config)
        responses = trainer.source.engine.greedy_responses(trainer.inputs.train.batch(list(range(4))))
        roles = trainer.roles
        found = {
            "spec": roles.actor.spec,
            "input_ids": responses.input_ids,
            "lengths": responses.lengths,
            "prompt_lengths": responses.prompt_lengths,
            "actor": trainer.exchange.gather(roles.actor.log_probs(responses)),
            "reference": trainer.exchange.gather(roles.reference.log_probs(responses)),
        }
        trainer.fit()
        torch.save(found, out / f"{trainer.config.name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
