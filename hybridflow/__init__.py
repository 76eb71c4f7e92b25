"""hybridflow: PPO, GRPO and flows of one's own for language models, trained by Megatron-core and sampled by vLLM.

`import hybridflow` loads none of torch, megatron-core and vLLM; the trainer is imported when it is asked for:

    from hybridflow import RLTrainer

    RLTrainer.from_yaml("my_experiment.yaml", ["seed=3"]).fit()

A flow of one's own is a function of a `hybridflow.flows.run.Run`. docs/architecture.md shows what lies where.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hybridflow.trainer import RLTrainer as RLTrainer
else:

    def __getattr__(name: str) -> object:
        if name == "RLTrainer":
            from hybridflow.trainer import RLTrainer

            return RLTrainer
        raise AttributeError(f"module 'hybridflow' has no attribute '{name}'")
