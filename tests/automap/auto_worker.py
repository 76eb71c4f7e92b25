"""Runs of configs, each for so many iterations: what each rank then holds, and what is predicted: OUT/NAME_RANK.json.

torchrun --nproc-per-node 2 -m tests.automap.auto_worker OUT NUM_ITERATIONS CONFIG...
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from hybridflow.automap.explained import chosen_values
from hybridflow.config import TrainedRoleConfig, read_tree
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import config_class
from hybridflow.models import pipeline
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.parallel import platform as platforms
from hybridflow.placement.footprint import ITEM_BYTES, output_bytes, training_activation_bytes
from hybridflow.placement.forecast import RoleMemory, memory_of
from hybridflow.roles.base import TrainedRole
from hybridflow.trainers.fixed_data import FixedDataTrainer
from hybridflow.trainers.online import OnlineTrainer
from tests.placement.kept import KeptBytes


def report(trainer: OnlineTrainer | FixedDataTrainer, passes: dict[int, list[dict[str, int]]]) -> dict[str, object]:
    rank, memory = trainer.platform.rank, memory_of(trainer.placed)
    found: dict[str, object] = {"chosen": chosen_values(trainer.config), "first": trainer.run.state.iteration}
    for name, role in trained(trainer).items():
        layout = trainer.placed.models[name].layout
        if role is None or rank not in layout:
            continue
        stage = layout.coordinates(rank).pp
        counted = memory.roles[name].training[stage]
        found[name] = {
            "held": role.training_model.memory_bytes(),
            "counted": {kind: getattr(counted, kind) for kind in ("weights", "gradients", "optimizer")},
            "activations": activations(memory.roles[name], stage, passes[id(role.chunks)]),
        }
    if isinstance(trainer, OnlineTrainer) and trainer.generator.engine is not None:
        counted = memory.moments()["generation"](rank)["engine"]
        held = sum(storage.nbytes() for storage in cache_storages(trainer))
        found["kv_cache"] = {"held": held, "counted": counted.kv_cache}
    return found


def cache_storages(trainer: OnlineTrainer) -> list[torch.UntypedStorage]:
    """Of vLLM's own tensors, taken back."""
    engine = trainer.generator.engine
    assert engine is not None
    engine.kv_cache.restore()
    runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    found = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in runner.kv_caches}
    return list(found.values())


def activations(role: RoleMemory, stage: int, seen: list[dict[str, int]]) -> list[dict[str, int]]:
    """Of each gradient that was taken: bytes that autograd kept, and those that the table has for as many tokens."""
    model, config = role.model, role.model.config
    assert isinstance(config, TrainedRoleConfig)
    return [
        {
            **each,
            "outputs": output_bytes(
                model.spec,
                model.head,
                tp=model.layout.tp,
                itemsize=ITEM_BYTES[config.dtype],
                rows=each["tokens"] if stage == model.layout.pp - 1 else 0,
                backward=True,
            ),
            "counted": training_activation_bytes(
                model.spec,
                model.layout,
                stage,
                head=model.head,
                itemsize=ITEM_BYTES[config.dtype],
                sequence_parallel=config.sequence_parallel,
                recompute=config.recompute,
                tokens=each["tokens"],
                replica_tokens=each["replica_tokens"],
            ),
        }
        for each in seen
    ]


def note_passes(seen: dict[int, list[dict[str, int]]]) -> None:
    """From here on, of each gradient: what autograd keeps at most, tokens of the largest micro-batch, and of all."""
    plain = pipeline.forward_backward

    def noted(chunks: Any, grid: Any, micro_batches: list[MicroBatch], loss: Any) -> Any:
        weights = [weight for chunk in chunks for weight in chunk.parameters()]
        with KeptBytes(weights) as kept:
            done = plain(chunks, grid, micro_batches, loss)
        tokens = [len(mb.input_ids) for mb in micro_batches]
        own = {"kept": kept.peak, "tokens": max(tokens), "replica_tokens": sum(tokens)}
        seen.setdefault(id(chunks), []).append(own)
        return done

    pipeline.forward_backward = noted


def trained(trainer: OnlineTrainer | FixedDataTrainer) -> dict[str, TrainedRole | None]:
    if isinstance(trainer, FixedDataTrainer):
        return {trainer.config.trained_name: trainer.models.trained()[0]}
    return {"actor": trainer.roles.actor, "critic": trainer.roles.critic}


def start(config: Path) -> OnlineTrainer | FixedDataTrainer:
    fixed = config_class(read_tree(config, ())) is FixedDataConfig
    return FixedDataTrainer.from_yaml(config) if fixed else OnlineTrainer.from_yaml(str(config))


def main(out: Path, num_iterations: int, configs: list[Path]) -> None:
    passes: dict[int, list[dict[str, int]]] = {}
    note_passes(passes)
    for config in configs:
        passes.clear()
        trainer = start(config)
        first = trainer.run.state.iteration
        trainer.fit(num_iterations)
        found = report(trainer, passes) | {"first": first + 1}
        (out / f"{config.stem}_{trainer.platform.rank}.json").write_text(json.dumps(found))
        # a winner may have its engine on one rank alone
        if isinstance(trainer, OnlineTrainer) and trainer.generator.engine is not None:
            trainer.generator.engine.close()
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]])
