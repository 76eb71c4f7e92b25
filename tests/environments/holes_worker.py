"""Trains twice on the first batch that a run with an environment has dumped: as it is, and with NaN in each value of a
token that the policy has not written, of the engine's and of all that the models compute.

python -m tests.environments.holes_worker CONFIG RUN OUT CASE ...
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.config import ExperimentConfig
from hybridflow.flows import bookkeeping, known
from hybridflow.flows import run as run_module
from hybridflow.flows.replay import Replay
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.given import trained_weights
from tests.environments.rollouts_worker import TALK, named

IMPORTANCE = "policy: {importance: {cap: 2.0}}"
UPDATE = "update: {mini_batch_size: 8}"
CASES = {
    "ppo": [f"algorithm={{name: ppo, kl: {{use: reward, coef: 0.1}}, {UPDATE}, {IMPORTANCE}}}", "CRITIC"],
    "grpo": [f"algorithm={{name: grpo, kl: {{use: loss, estimator: k3, coef: 0.1}}, {UPDATE}, {IMPORTANCE}}}"],
}
NAN = float("nan")


def trained(config: ExperimentConfig, run: Path, *, holes: bool) -> dict[str, Tensor]:
    """Weights, per-token values at the policy's tokens, and metrics."""
    masks: list[Tensor] = []
    given, exchanged = Replay.rollout, Exchange.gather_all

    def rollout(self: Replay, *arguments: Any, **named: Any) -> RolloutBatch:
        batch = given(self, *arguments, **named)
        masks.append(batch.response_mask)
        return replace(batch, rollout_log_probs=hollow(batch.rollout_log_probs)) if holes else batch

    def wholes(self: Exchange, contributions: list[PartialTensor]) -> list[Tensor]:
        return [hollow(x) if holes else x for x in exchanged(self, contributions)]

    def hollow(x: Tensor) -> Tensor:
        per_token = masks and x.is_floating_point() and len(x) == len(masks[0])
        return x.masked_fill(~masks[0], NAN) if per_token else x

    Replay.rollout, Exchange.gather_all = rollout, wholes  # type: ignore[method-assign]
    for module in (bookkeeping, known, run_module):  # which would tell of a NaN anywhere
        module.check_finite = lambda values, rollout: None
    try:
        trainer = OnlineTrainer(config, replay=run)
        noted: dict[str, Any] = {}
        iterate = trainer.iterate

        def noting(*arguments: Any) -> Any:
            noted["done"] = iterate(*arguments)
            return noted["done"]

        trainer.iterate = noting  # type: ignore[method-assign]
        trainer.fit()
    finally:
        Replay.rollout, Exchange.gather_all = given, exchanged  # type: ignore[method-assign]
    done = noted["done"]
    found = {f"weight {i}": weight.clone() for i, weight in enumerate(trained_weights(trainer.roles))}
    tensors = done.batch.tensors().items()
    found |= {name: x[masks[0]] if len(x) == len(masks[0]) else x for name, x in tensors}
    found["number of tensors with holes"] = torch.tensor(sum(bool(x.isnan().any()) for _, x in tensors))
    return found | {
        f"metric {name}": torch.tensor(float(x))
        for name, x in done.metrics.items()
        if not name.startswith(("memory/", "speed/", "time/")) and not name.endswith(("_ms", "_per_sec"))
    }


def main(config: Path, run: Path, out: Path, names: list[str]) -> None:
    root, found = config.parent, {}
    for name in names:
        own = [f"critic={{model: {root / 'critic'}, dtype: float32, optimizer: {{lr: 0.001}}}}"]
        overrides = [part for part in CASES[name] if part != "CRITIC"] + own * ("CRITIC" in CASES[name])
        overrides += [f"reference={{model: {root / 'reference'}, dtype: float32}}", named("Talk", **TALK)]
        for kind in ("whole", "holes"):
            given = [*overrides, f"name={name}_{kind}", "num_iterations=1", "data.heldout=null"]
            read = ExperimentConfig.from_yaml(config, given)
            found[f"{name} {kind}"] = trained(read, run, holes=kind == "holes")
    torch.save(found, out)
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
