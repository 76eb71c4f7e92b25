"""A run, its replays, and runs that only roll out; what the weights were after each iteration as JSON.

torchrun --nproc-per-node 2 -m tests.flows.replay_worker CONFIG OUT
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.config import ExperimentConfig
from hybridflow.errors import UserError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.parallel.agreement import digest_tensors
from hybridflow.recording.iteration import Iteration
from hybridflow.trainers.online import OnlineTrainer
from tests.flows.flows_worker import NO_CRITIC, NO_REWARD, custom

GRPO = ["sampling.samples_per_prompt=2", "critic=null", "algorithm={name: grpo, update: {mini_batch_size: 4}}"]
ROLLOUTS = {"ppo": [], "grpo": GRPO, "direct_step": [*NO_REWARD, custom("products")]}


class Watched(OnlineTrainer):
    """A trainer that notes the weights after each iteration, `start` before the first."""

    def iterate(self, *arguments: Any) -> Iteration | None:
        if "start" not in vars(self).setdefault("weights", {}):
            self.weights["start"] = self._digest()
        done = super().iterate(*arguments)
        self.weights[str(arguments[0])] = self._digest()
        return done

    def _digest(self) -> str:
        parameters = [p.data for role in self.roles.trained() for chunk in role.chunks for p in chunk.parameters()]
        return digest_tensors({str(i): x for i, x in enumerate(parameters)}).hex()


def main(config: Path, out: Path) -> None:
    weights: dict[str, dict[str, str]] = {}

    def fit(name: str, *overrides: str, run_name: str | None = None, **how: Any) -> None:
        try:
            trainer = Watched(ExperimentConfig.from_yaml(config, [f"name={run_name or name}", *overrides]), **how)
            trainer.fit()
            weights[name] = trainer.weights
        except UserError as error:
            weights[name] = {"error": f"{type(error).__name__}: {error}"}
            return
        if not how.get("replay"):
            trainer.generator.engine.close()

    run = config.parent / "run"
    fit("run", "metrics.dump_batches=true")
    with no_vllm():
        fit("replayed", run_name="run", replay=run)
        fit("second", replay=run / "batches" / "iteration_000002.safetensors")
        fit("greedy", *NO_REWARD, custom("sampled_and_greedy"), replay=run)
        fit("other_prompts", "seed=2", "data.shuffle=true", replay=run)
    for name, overrides in ROLLOUTS.items():
        fit(name, *overrides, rollout_only=True)
    with no_vllm():
        for name in ("grpo", "direct_step"):
            fit(f"{name}_replayed", *ROLLOUTS[name], replay=config.parent / f"{name}-rollout")
    best = {"name": "custom", "flow": "tests.flows.flows:few_rows", "roles": ["actor"]}
    fit(
        "kept", *NO_REWARD, f"algorithm={json.dumps(best)}", "actor.tensor_parallel_size=1", "metrics.dump_batches=true"
    )
    with no_vllm():
        fit(
            "kept_replayed",
            *NO_CRITIC,
            "algorithm={name: custom, flow: 'tests.flows.flows:few_rows', roles: [actor]}",
            "reward=null",
            replay=config.parent / "kept",
        )
    if torchrun.torchrun_rank()[0] == 0:
        out.write_text(json.dumps(weights))
    platforms.stop()


@contextlib.contextmanager
def no_vllm() -> Iterator[None]:
    """Whoever imports vLLM within the block fails, as where it is not installed."""
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    sys.modules.update(dict.fromkeys([*hidden, "vllm"]))
    try:
        yield
    finally:
        sys.modules.update(hidden)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
