"""Export the actor before and after training, as a user's own script would drive the trainer.

torchrun --nproc-per-node N -m tests.distributed.export_worker CONFIG OUT
"""

import sys
from pathlib import Path

import torch

from hybridflow import RLTrainer
from hybridflow.checkpoint.export import export_huggingface


def main(config: str, out: Path) -> None:
    trainer = RLTrainer.from_yaml(config, ["metrics.num_samples=2"])
    export_huggingface(trainer.roles.actor, out / "before")
    export_huggingface(trainer.roles.actor, out / "sharded", max_file_bytes=300_000)
    trainer.fit(num_iterations=1)
    prompts = trainer.inputs.train.batch(list(range(4)))
    responses = trainer.source.engine.greedy_responses(prompts)
    log_probs = trainer.exchange.gather(trainer.roles.actor.log_probs(responses))
    if trainer.platform.rank == 0:
        fields = {name: getattr(responses, name) for name in ("input_ids", "lengths", "prompt_lengths")}
        torch.save(fields | {"log_probs": log_probs}, out / "responses.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
