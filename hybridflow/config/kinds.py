"""The config of a run of either kind: learning from what an engine generates, or from the rows of files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.experiment import ExperimentConfig
from hybridflow.config.files import read_tree
from hybridflow.config.fixed_algorithms import FIXED_ALGORITHMS
from hybridflow.config.fixed_data import FixedDataConfig

AnyConfig = ExperimentConfig | FixedDataConfig


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> AnyConfig:
    """The config of a file. algorithm.name chooses the kind of config. Errors: ConfigError."""
    tree = read_tree(path, overrides)
    return config_class(tree).from_tree(tree, path)


def config_class(tree: Mapping[str, Any]) -> type[ExperimentConfig] | type[FixedDataConfig]:
    """By the name of the algorithm alone."""
    algorithm = tree.get("algorithm")
    fixed = isinstance(algorithm, Mapping) and algorithm.get("name") in FIXED_ALGORITHMS
    return FixedDataConfig if fixed else ExperimentConfig
