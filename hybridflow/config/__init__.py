"""The config of a run: sections, YAML files, and what is wrong with them."""

from hybridflow.config.algorithms import ALGORITHMS as ALGORITHMS
from hybridflow.config.experiment import ExperimentConfig as ExperimentConfig
from hybridflow.config.files import read_tree as read_tree
from hybridflow.config.files import read_value as read_value
from hybridflow.config.files import set_key as set_key
from hybridflow.config.metrics import MetricsConfig as MetricsConfig
from hybridflow.config.metrics import MlflowConfig as MlflowConfig
from hybridflow.config.metrics import WandbConfig as WandbConfig
from hybridflow.config.old_keys import AlgorithmConfig as AlgorithmConfig
from hybridflow.config.roles import LayoutConfig as LayoutConfig
from hybridflow.config.roles import OptimizerConfig as OptimizerConfig
from hybridflow.config.roles import RewardConfig as RewardConfig
from hybridflow.config.roles import RewardModelConfig as RewardModelConfig
from hybridflow.config.roles import RoleConfig as RoleConfig
from hybridflow.config.roles import RolloutConfig as RolloutConfig
from hybridflow.config.roles import TrainedRoleConfig as TrainedRoleConfig
from hybridflow.config.run import CheckpointConfig as CheckpointConfig
from hybridflow.config.run import RunConfig as RunConfig
from hybridflow.config.sampling import SamplingConfig as SamplingConfig
