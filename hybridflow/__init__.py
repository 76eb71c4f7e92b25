"""hybridflow: PPO, GRPO and flows of one's own for language models, trained by Megatron-core and sampled by vLLM.

`import hybridflow` loads none of torch, megatron-core and vLLM; the trainer is imported when it is asked for:

    from hybridflow import RLTrainer

    RLTrainer.from_yaml("my_experiment.yaml", ["seed=3"]).fit()

on the rows of files by `FixedDataTrainer`; or of models, as in tutorials: `hybridflow.trainers.tutorial_names`. A flow
of one's own is a function of a `hybridflow.flows.run.Run`.
docs/explanation/architecture.md shows what lies where.
"""

import logging
from typing import TYPE_CHECKING

__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())  # who uses the library says where its records go

if TYPE_CHECKING:
    from hybridflow.trainers.fixed_data import FixedDataTrainer as FixedDataTrainer
    from hybridflow.trainers.tutorial_names import RLTrainer as RLTrainer
    from hybridflow.trainers.tutorial_names import create_critic_model as create_critic_model
    from hybridflow.trainers.tutorial_names import get_trainer_config as get_trainer_config
    from hybridflow.trainers.tutorial_names import make_rl_data_loader as make_rl_data_loader
else:

    def __getattr__(name: str) -> object:
        if name in ("RLTrainer", "FixedDataTrainer"):
            from hybridflow.parallel.platform import quiet_libraries

            quiet_libraries()  # before megatron-core loads, as `hybridflow train` does
        if name in ("RLTrainer", "create_critic_model", "get_trainer_config", "make_rl_data_loader"):
            from hybridflow.trainers import tutorial_names

            return getattr(tutorial_names, name)
        if name == "FixedDataTrainer":
            from hybridflow.trainers.fixed_data import FixedDataTrainer

            return FixedDataTrainer
        raise AttributeError(f"module 'hybridflow' has no attribute '{name}'")
