"""A run, and the same run on its rollouts as files of a queue, with the source that a directory's my_source.py has.

torchrun --nproc-per-node 2 -m tests.flows.own_source_worker CONFIG DIRECTORY OUT
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hybridflow.config import ExperimentConfig
from hybridflow.errors import DataError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.parallel.agreement import digest_tensors
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.tiny_experiment import PROMPTS_PER_ITERATION
from tests.flows.replay_worker import no_vllm

REPLICAS = ["actor.tensor_parallel_size=1"]  # two of the engine: models score while the other one generates


def main(config: Path, directory: Path, out: Path) -> None:
    sys.path.insert(0, str(directory))
    from my_source import QueueDirectory

    is_first, queue = torchrun.torchrun_rank()[0] == 0, directory / "queue"
    engine = OnlineTrainer(ExperimentConfig.from_yaml(config, ["name=engine", "metrics.dump_batches=true", *REPLICAS]))
    engine.fit()
    engine.generator.engine.close()
    known = {"engine": digest(engine)}
    source, num_rows = partial(QueueDirectory, queue, 3.0), len(engine.inputs.train)
    queued = [f"data.train={config.parent / 'turned.jsonl'}", "name=queued", *REPLICAS]
    for iteration in (1, 2):
        if is_first:
            put(config.parent / "engine" / "batches", queue, iteration, num_rows)
        with no_vllm():
            trainer = OnlineTrainer(ExperimentConfig.from_yaml(config, queued), source=source)
            try:
                trainer.fit()
                known["queued"] = digest(trainer)
            except DataError as error:
                known["starved"] = "\n".join([str(error), *error.__notes__])
    if is_first:
        out.write_text(json.dumps(known))
    platforms.stop()


def put(batches: Path, queue: Path, iteration: int, num_rows: int) -> None:
    """The batch of an iteration, answering the rows of the file whose order is turned round."""
    first, name = (iteration - 1) * PROMPTS_PER_ITERATION, f"iteration_{iteration:06d}.safetensors"
    numbers = num_rows - 1 - torch.arange(first, first + PROMPTS_PER_ITERATION)
    queue.mkdir(exist_ok=True)
    save_file(load_file(batches / name) | {"prompt_numbers": numbers}, queue / "partial")
    os.replace(queue / "partial", queue / name)


def digest(trainer: OnlineTrainer) -> str:
    """Of the trained weights on this rank."""
    parameters = [p.data for role in trainer.roles.trained() for chunk in role.chunks for p in chunk.parameters()]
    return digest_tensors({str(i): x for i, x in enumerate(parameters)}).hex()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
