"""GRPO runs of a mixture of experts in bfloat16, with and without the engine's experts; their metrics as JSON.

torchrun --nproc-per-node 2 -m tests.flows.routing_worker CONFIG OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

from hybridflow.config import ExperimentConfig
from hybridflow.errors import UserError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.recording.iteration import Iteration
from hybridflow.trainers.online import OnlineTrainer

REPLAY = "algorithm.policy.replay_routing=true"
STAGES = [
    "actor.sequence_parallel=false",
    "actor.tensor_parallel_size=1",
    "actor.pipeline_parallel_size=2",
    "rollout.pipeline_parallel_size=2",
]
RUNS: dict[str, list[str]] = {
    "own": [],
    "replayed": [REPLAY],
    "one step": [REPLAY, "algorithm.update.mini_batch_size=null"],
    "engine log-probs": [REPLAY, "algorithm.policy.old_log_probs=engine"],
    "stages": [REPLAY, *STAGES],
    "groups that differ": [REPLAY, "algorithm.dynamic_sampling={max_generation_rounds: 2}"],
}


class Watched(OnlineTrainer):
    """A trainer that notes the metrics of each iteration, and whether its batch has the engine's experts."""

    def iterate(self, *arguments: Any) -> Iteration | None:
        done = super().iterate(*arguments)
        noted = {name: float(value) for name, value in done.metrics.items()}
        noted["layers"] = done.batch.routed_experts.shape[1]
        vars(self).setdefault("noted", []).append(noted)
        return done


def main(config: Path, out: Path) -> None:
    found: dict[str, Any] = {}

    def fit(name: str, *overrides: str, **how: Any) -> None:
        try:
            trainer = Watched(ExperimentConfig.from_yaml(config, [f"name={name.replace(' ', '-')}", *overrides]), **how)
            trainer.fit()
        except UserError as error:
            found[name] = f"{type(error).__name__}: {error}"
            return
        found[name] = trainer.noted
        if not how:
            trainer.generator.engine.close()

    for name, overrides in RUNS.items():
        fit(name, *overrides, "metrics.dump_batches=true")
    fit("again", REPLAY, replay=config.parent / "replayed")
    fit("without experts", REPLAY, replay=config.parent / "own")
    fit("experts not asked for", replay=config.parent / "replayed")
    if torchrun.torchrun_rank()[0] == 0:
        out.write_text(json.dumps(found))
    platforms.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
