"""Files that an invalid config names and this machine lacks, as far as the config shows them; without torch."""

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.hub import cached_directory
from hybridflow.config.kinds import AnyConfig, config_class
from hybridflow.errors import ConfigError, Reasons

ROLES = ("actor", "critic", "reference", "reward_model")


def read_config(tree: dict[str, Any], source: str | Path) -> AnyConfig:
    """The config of a tree. Errors: ConfigError with every wrong key, and with every named file that is missing."""
    reasons = Reasons()
    try:
        return config_class(tree).from_tree(tree, source)
    except ConfigError as error:
        reasons.lines += str(error).splitlines()
    from hybridflow.data.sources import data_files  # numpy and more load for a second: only where it has failed anyway
    from hybridflow.rewards.probe import described

    for key, model in _models(tree):
        if not os.path.exists(os.path.expanduser(cached_directory(model))):
            reasons.lines.append(f"{key}.model = {model}: no such directory")
    for name in ("train", "heldout"):
        file = _section(tree, "data").get(name)
        if isinstance(file, str) and not any(f"data.{name} = " in line for line in reasons.lines):
            reasons.collect(data_files, os.path.expanduser(file), f"data.{name}")
    reasons.collect(described, [(function, {}) for function in _functions(tree)])
    _note_lengths(tree, source, reasons)
    reasons.refuse()
    raise AssertionError("there was a reason")


def _note_lengths(tree: Mapping[str, Any], source: str | Path, reasons: Reasons) -> None:
    """Note what the models say of a config of which nothing but budgets of tokens is wrong: that they know fewer
    positions, too. Larger budgets would only bring that up next."""
    free = copy.deepcopy(dict(tree))
    sections = [_section(free, key) for key in ROLES] + (_section(free, "reward").get("models") or [])
    for section in sections:
        if isinstance(section, dict):
            section.pop("micro_batch_tokens", None)
    try:
        config = config_class(free).from_tree(free, source)
    except ConfigError:
        return
    from hybridflow.placement.placed import check_models  # it loads torch

    check_models(config, reasons)


def _models(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ROLES:
        model = _section(tree, key).get("model")
        if isinstance(model, str):
            yield key, model


def _functions(tree: Mapping[str, Any]) -> list[str]:
    """Functions without arguments: mistakes in arguments are reported once the keys are right."""
    listed = _section(tree, "reward").get("functions")
    found = [one.get("function") for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    return [function for function in found if isinstance(function, str)]


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = tree.get(key)
    return section if isinstance(section, Mapping) else {}
