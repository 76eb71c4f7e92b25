"""GRPO runs of a mixture of experts in bfloat16, with and without the engine's experts; their metrics as JSON.

torchrun --nproc-per-node 2 -m tests.flows.routing_worker CONFIG OUT
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hybridflow.config import ExperimentConfig
from hybridflow.errors import Stopped, UserError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.parallel.exchange import Exchange
from hybridflow.recording.iteration import Iteration
from hybridflow.roles.generator import Generator
from hybridflow.trainers.online import OnlineTrainer

REPLAY = "algorithm.policy.replay_routing=true"
STAGES = [
    "actor.sequence_parallel=false",
    "actor.tensor_parallel_size=1",
    "actor.pipeline_parallel_size=2",
    "rollout.pipeline_parallel_size=2",
]
GROUPS = [
    *(REPLAY, *STAGES[:2], "algorithm.dynamic_sampling={max_generation_rounds: 3}", "sampling.samples_per_prompt=6"),
    "reward={functions: [{function: tests.flows.dynamic_rewards:first_is_a_digit}]}",
]
RUNS: dict[str, list[str]] = {
    "own": [],
    "replayed": [REPLAY],
    "activations kept": [REPLAY, "actor.recompute=none"],
    "one step": [REPLAY, "algorithm.update.mini_batch_size=null"],
    "engine log-probs": [REPLAY, "algorithm.policy.old_log_probs=engine"],
    "stages": [REPLAY, *STAGES],
    "two replicas": [REPLAY, *STAGES[:2]],
    "groups that differ": GROUPS,
}


EPOCHS = [REPLAY, *STAGES[:2], "algorithm.update={mini_batch_size: 8, epochs: 2}"]  # of two mini-batches


class Watched(OnlineTrainer):
    """A trainer that notes the metrics of each iteration, and whether its batch has the engine's experts.

    messages, crossed: exchanges of records in the iteration, and bytes that went from a rank to another.
    """

    def iterate(self, *arguments: Any) -> Iteration | None:
        with mock.patch.object(Exchange, "swap", autospec=True, side_effect=Exchange.swap) as swap:
            done = super().iterate(*arguments)
        noted = {name: float(value) for name, value in done.metrics.items()}
        noted["layers"] = self.placed.actor.spec.num_layers if done.batch.record_ids is not None else 0
        sent = [(i, len(x)) for call in swap.call_args_list for i, x in enumerate(call.args[1])]
        crossed = torch.tensor(sum(size for i, size in sent if i != self.platform.rank))
        noted |= {"messages": swap.call_count, "crossed": int(self.exchange.sum(crossed))}
        noted["tokens"] = int(done.batch.lengths.sum())
        vars(self).setdefault("noted", []).append(noted)
        return done


def main(config: Path, out: Path) -> None:
    found: dict[str, Any] = {}

    def fit(name: str, *overrides: str, **how: Any) -> None:
        experiment = ExperimentConfig.from_yaml(config, [f"name={name.replace(' ', '-')}", *overrides])
        try:
            trainer = Watched(experiment, **how)
            with closed(getattr(trainer, "generator", None)):  # a replay has none
                trainer.fit()
        except (UserError, Stopped) as error:
            found[name] = f"{type(error).__name__}: {error}"
            return
        found[name] = trainer.noted

    for name, overrides in RUNS.items():
        fit(name, *overrides, "metrics.dump_batches=true")
    fit("groups resumed", *GROUPS, "metrics.dump_batches=true", "num_iterations=1")
    fit("groups resumed", *GROUPS, "metrics.dump_batches=true")
    fit("two epochs", *EPOCHS)
    fit("two epochs own", *EPOCHS[1:])
    fit("kept", REPLAY, "checkpoint.max_hours=1e-9", "checkpoint.save_rollout=true")
    found["stopped"] = found["kept"]
    fit("kept", REPLAY, "checkpoint.save_rollout=true")
    fit("again", REPLAY, replay=config.parent / "replayed")
    fit("without experts", REPLAY, replay=config.parent / "own")
    fit("experts not asked for", replay=config.parent / "replayed")
    if torchrun.torchrun_rank()[0] == 0:
        out.write_text(json.dumps(found))
    platforms.stop()


@contextlib.contextmanager
def closed(generator: Generator | None) -> Iterator[None]:
    """After the block an engine is closed, for the next one."""
    try:
        yield
    finally:
        if generator is not None and generator.engine is not None:
            generator.engine.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
