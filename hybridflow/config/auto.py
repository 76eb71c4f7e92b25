"""Where a config's tree says `auto`, before anything of it is checked. Pure.

    free = autos(read_tree("my.yaml"))         {"actor": {"tensor_parallel_size", ...}, "engine": {"kv_cache_gib"}}

`automap.auto` chooses the values.
"""

import copy
from collections.abc import Mapping
from typing import Any

AUTO = "auto"
ENGINE = "engine"  # the section rollout, as a thing to place
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size", "data_parallel_size")
ROLE_KEYS = (*SIZES, "context_parallel_size", "expert_parallel_size", "sequence_parallel", "micro_batch_tokens")
TRAINED_KEYS = (*ROLE_KEYS, "recompute", "offload_optimizer", "offload_gradients")
ENGINE_KEYS = ("tensor_parallel_size", "pipeline_parallel_size", "kv_cache_gib")
TRAINED = ("actor", "critic", "reward_model")
OTHERS = ("reference",)
MANY_TOKENS = 1 << 30
Tree = dict[str, Any]


def autos(tree: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Role, or `engine`, -> the keys that are `auto`; none where the config has numbers throughout."""
    found = {}
    for name, section, keys in sections(tree):
        given = frozenset(key for key in keys if section.get(key) == AUTO)
        if given:
            found[name] = given
    return found


def sections(tree: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """(role, section, keys that may be auto) of those that there are."""
    reward = tree.get("reward")
    models = reward.get("models") if isinstance(reward, dict) else None
    found: list[tuple[str, Any, tuple[str, ...]]] = [(name, tree.get(name), TRAINED_KEYS) for name in TRAINED]
    found += [(name, tree.get(name), ROLE_KEYS) for name in OTHERS]
    found += [(f"reward.models.{i}", model, ROLE_KEYS) for i, model in enumerate(models or ())]
    found.append((ENGINE, tree.get("rollout"), ENGINE_KEYS))
    return [(name, section, keys) for name, section, keys in found if isinstance(section, dict)]


def with_neutral(tree: Mapping[str, Any]) -> Tree:
    """With a value that any rule lets pass in the place of each `auto`: for whoever does not look at sizes."""
    found: Tree = copy.deepcopy(dict(tree))
    for _, section, keys in sections(found):
        for key in keys:
            if section.get(key) == AUTO:
                section[key] = _neutral(key, section)
    return found


def replaceable(tree: Mapping[str, Any]) -> Tree:
    """With neutral values for all that a search chooses, where roles lie included: what is left has to be right."""
    found: Tree = copy.deepcopy(dict(tree))
    rollout = found.get("rollout")
    beside = isinstance(rollout, dict) and rollout.get("max_staleness") and not rollout.get("partial")
    for name, section, keys in sections(found):
        section |= {key: AUTO for key in keys if key in section}
        for key in ("ranks", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            section.pop(key, None)
        if beside:  # which has to lie apart, wherever
            section["ranks"] = "1" if name == ENGINE else "0"
    return with_neutral(found)


def _neutral(key: str, section: Mapping[str, Any]) -> Any:
    if key == "tensor_parallel_size":
        return 2 if section.get("sequence_parallel") is True else 1
    if key == "pipeline_parallel_size":
        stays = ("virtual_pipeline_parallel_size", "num_layers_in_first_pipeline_stage")
        cut = any(section.get(each) not in (None, 1, AUTO) for each in (*stays, "num_layers_in_last_pipeline_stage"))
        return 2 if cut else 1
    if key == "micro_batch_tokens":
        return MANY_TOKENS
    neutral = {
        "virtual_pipeline_parallel_size": 1,
        "recompute": "none",
        "data_parallel_size": None,
        "context_parallel_size": 1,
        "expert_parallel_size": 1,
    }
    return None if key == "kv_cache_gib" else neutral.get(key, False)
