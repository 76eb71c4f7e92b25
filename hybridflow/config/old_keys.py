"""Keys that have another name or place now, and are still read."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from hybridflow.config.algorithms import Algorithm
from hybridflow.errors import ConfigError

ENV_VARS, OLD_ENV_VARS = "env_vars", "environment"

# where the keys of configs without a name went, below algorithm: before there were names, there was PPO with these
MOVED = {
    "clip_range": "policy.clip_range",
    "clip_range_high": "policy.clip_range_high",
    "dual_clip": "policy.dual_clip",
    "entropy_coef": "policy.entropy_coef",
    "importance_cap": "policy.importance.cap",
    "ppo_epochs": "update.epochs",
    "mini_batch_size": "update.mini_batch_size",
}


def _moved(key: str, value: Any) -> dict[str, Any]:
    """What an old key is in the section that it went to; nothing where it turned off what is off unless it is given."""
    match key, value:
        case (("dual_clip" | "importance_cap"), None):
            return {}
        case "dual_clip", _:
            return {"dual_clip": value, "kind": "dual_clip"}
        case "importance_cap", _:
            return {"importance": {"kind": "token", "cap": value}}
    return {MOVED[key].rpartition(".")[2]: value}


def _named(given: Any) -> Any:
    """An `algorithm` section without a name is PPO's; the keys that it had of old go where they are now."""
    if not isinstance(given, dict) or "name" in given:
        return given
    tree = {key: value for key, value in given.items() if key not in MOVED}
    for key, place in MOVED.items():
        if key not in given:
            continue
        section = place.partition(".")[0]
        new, part = _moved(key, given[key]), tree.get(section) or {}
        if not isinstance(part, dict) or (new.keys() - {"kind"}) & part.keys():
            raise ValueError(f"{key} is now {place}, which is given too: leave one out")
        tree[section] = part | new
    return {"name": "ppo", **tree}


def with_new_names(tree: dict[str, Any], source: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tree with today's names of the sections, and a note for each section under an old name.

    Errors: ConfigError where it has both.
    """
    if OLD_ENV_VARS not in tree:
        return tree, ()
    if ENV_VARS in tree:
        raise ConfigError(f"{source}: {OLD_ENV_VARS} is now {ENV_VARS}, which is given too: leave one out")
    found = {ENV_VARS if key == OLD_ENV_VARS else key: value for key, value in tree.items()}
    return found, (f"{source}: {OLD_ENV_VARS} is now {ENV_VARS}; it is read this time",)


AlgorithmConfig = Annotated[Algorithm, Field(discriminator="name"), BeforeValidator(_named)]
