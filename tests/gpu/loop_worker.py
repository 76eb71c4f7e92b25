"""Train with an engine whose weights all lie in memory of its own, though one rank has them all: as if gathered.

torchrun --nproc-per-node 1 -m tests.gpu.loop_worker CONFIG OUT

One GPU cannot gather from others. Here a hand-off moves every weight to reserved addresses, and the training storages
are released meanwhile. On a CPU those addresses are of a simulated device, and there are no graphs.
"""

import json
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hybridflow.parallel import platform as platforms
from hybridflow.parallel.device import uses_cuda
from hybridflow.reshard.execute import WeightReshard
from hybridflow.reshard.plan import Operation, ReshardPlan, Way, plan_reshard
from hybridflow.roles import generator
from hybridflow.trainers.online import OnlineTrainer
from tests.reshard.simulated import SimulatedDevice


class Gathered(ReshardPlan):
    """No weight of the engine lies in the trainer's memory."""

    is_in_place = False

    def operations(self, rank: int) -> tuple[Operation, ...]:
        return tuple(replace(operation, way=Way.GATHER) for operation in super().operations(rank))


def gathered_plan(*arguments: object, **named: int) -> ReshardPlan:
    plan = plan_reshard(*arguments, **named)
    plan.__class__ = Gathered
    return plan


def on_simulated_device(*arguments: Any, **named: Any) -> WeightReshard:
    return WeightReshard(*arguments, **named | {"space": SimulatedDevice()})


def main(config: Path, out: Path) -> None:
    reshard = WeightReshard if uses_cuda() else on_simulated_device
    with mock.patch.multiple(generator, plan_reshard=gathered_plan, WeightReshard=reshard):
        trainer = OnlineTrainer.from_yaml(str(config))
    engine, awake, addresses = trainer.generator.engine, trainer.generator.awake, []

    def watched() -> AbstractContextManager[None]:
        addresses.append({name: x.data_ptr() for name, x in engine.parameters().items()})
        return awake()

    trainer.generator.awake = watched
    own_bytes = trainer.generator.own_bytes
    trainer.fit()
    mode = engine._engine.vllm_config.compilation_config.cudagraph_mode
    out.write_text(
        json.dumps(
            {
                "hand_offs": len(addresses),
                "moved": sorted({name for found in addresses for name in found if found[name] != addresses[0][name]}),
                "own_bytes": own_bytes,
                "graphs": str(mode.name),
                "why_eager": trainer.generator.why_eager,
            }
        )
    )
    platforms.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
