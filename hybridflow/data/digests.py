"""Digests of what must be the same on every rank when a run starts: config, code, tokenizer, prompts, models.

check_agreement(run_digests(config, inputs), dist.group.WORLD)
"""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hybridflow.config import TrainedRoleConfig
from hybridflow.config.algorithms import Custom
from hybridflow.config.kinds import AnyConfig
from hybridflow.data.environment import AgentInputs, EnvironmentInputs
from hybridflow.data.fixed_inputs import FixedInputs
from hybridflow.data.inputs import Inputs
from hybridflow.data.tokenizers import tokenizer_digest
from hybridflow.formats.weights_digest import WEIGHTS_OF, weights_digest
from hybridflow.parallel.agreement import code_digests, digest_bytes, digest_files, digest_samples
from hybridflow.rewards.functions import FunctionSpec
from hybridflow.user_code import load_function

ADAPTER_FILES = ("adapter_*", "*.distcp", ".metadata")  # of PEFT, or of a checkpoint


def run_digests(config: AnyConfig, inputs: Inputs | FixedInputs) -> dict[str, bytes]:
    """By the name that a message gives it. Of a model that a checkpoint holds only config.json."""
    models = {name: Path(role.model) for name, role in config.roles().items()}
    found = {
        "the config": digest_bytes(config.to_yaml().encode()),
        **code_digests(),
        f"the tokenizer of {config.trained_name}.model": tokenizer_digest(models[config.trained_name]),
        **{key: rows.digest for key, rows in inputs.rows_by_key.items()},
        **{f"config.json of {name}.model": digest_files([path / "config.json"], path) for name, path in models.items()},
        **weights_digests(config),
    }
    if isinstance(inputs, FixedInputs):
        return found
    return found | function_digests(config, inputs.functions) | environment_digests(inputs.environment)


def environment_digests(environment: EnvironmentInputs | AgentInputs | None) -> dict[str, bytes]:
    """Of the file that an environment's class or an agent stands in; not of what it imports."""
    return {} if environment is None else class_digests(environment.pool.config.path, environment.pool.file)


def class_digests(path: str, file: str | None) -> dict[str, bytes]:
    """Of the file of package.module:Class, or of an agent."""
    if file is None:
        return {}
    return {f"the file of {path.partition(':')[0]}": digest_files([Path(file)], Path(file).parent)}


def weights_digests(config: AnyConfig) -> dict[str, bytes]:
    """Of the weights that no checkpoint has, and of the adapters that a run begins with."""
    found, by_path = {}, cache(weights_digest)
    for name, role in config.roles().items():
        lora = role.lora if isinstance(role, TrainedRoleConfig) else None
        saved = isinstance(role, TrainedRoleConfig) or (config.algorithm.kl.resets and name == "reference")
        if lora is not None or not saved:
            found[f"{WEIGHTS_OF}{name}.model"] = by_path(role.model)
        if lora is not None and lora.adapter_path is not None:
            found[f"the adapters of {name}.lora.adapter_path"] = digest_samples(Path(lora.adapter_path), ADAPTER_FILES)
    return found


def function_digests(config: AnyConfig, functions: Sequence[FunctionSpec]) -> dict[str, bytes]:
    """Of the files that a user's functions stand in; not of what these import."""
    files = {spec.path.partition(":")[0]: spec.file for spec in functions}
    if isinstance(config.algorithm, Custom):
        load_function(config.algorithm.flow, "algorithm.flow")
        module = config.algorithm.flow.partition(":")[0]
        files[module] = getattr(sys.modules[module], "__file__", None)
    return {
        f"the file of {module}": digest_files([Path(file)], Path(file).parent)
        for module, file in files.items()
        if file is not None
    }
