"""What a config with tasks of reasoning-gym need not say: their scorer in `reward`, and in `metrics.eval_reward`. Pure.

with_scorer({"data": {"train": {"reasoning_gym": [...]}}, ...})     # the same tree, with reward.functions
"""

from collections.abc import Mapping
from typing import Any

from hybridflow.config.data import is_sets, is_tasks
from hybridflow.config.reasoning_gym import KEY, SCORER, ReasoningGymConfig

WITHOUT_REWARDS = ("distill", "custom")  # algorithms that have no section `reward` unless the config gives one
Tree = dict[str, Any]


def with_scorer(tree: Tree) -> Tree:
    """Of a config: with the scorer where nothing names it. A tree without tasks is given back as it is."""
    data, reward = _section(tree, "data"), tree.get("reward")
    if data is None or not is_tasks(data.get("train")) or data.get("environment") is not None:
        return tree
    named = {**tree, **_evaluated(tree, data)}
    algorithm = _section(tree, "algorithm") or {}
    if reward is None and algorithm.get("name") in WITHOUT_REWARDS:
        return named
    if not isinstance(reward, dict | None) or SCORER in _functions(reward or {}):
        return named
    given = (reward or {}).get("functions") or ()
    return {**named, "reward": {**(reward or {}), "functions": [_scorer(data["train"]), *given]}}


def _evaluated(tree: Tree, data: Mapping[str, Any]) -> Tree:
    """With held-out tasks the scorer says what is right, where the config does not."""
    metrics = _section(tree, "metrics") if "metrics" in tree else {}
    if metrics is None or not _has_tasks(data.get("heldout")) or metrics.get("eval_reward") is not None:
        return {}
    return {"metrics": {**metrics, "eval_reward": SCORER}}


def _has_tasks(heldout: Any) -> bool:
    if not is_sets(heldout):
        return is_tasks(heldout)
    sets = [each.get("files") if isinstance(each, dict) else getattr(each, "files", None) for each in heldout.values()]
    return any(map(is_tasks, sets))


def _scorer(train: Any) -> Tree:
    """A confined process takes a second to start: then one scores all responses to a prompt."""
    given = train.reasoning_gym if isinstance(train, ReasoningGymConfig) else train[KEY]
    tasks = given if isinstance(given, list | tuple) else ()  # anything else is refused where it is read
    confined = any(task.get("execute") if isinstance(task, dict) else getattr(task, "execute", False) for task in tasks)
    return {"function": SCORER, **({"per": "group"} if confined else {})}


def _functions(reward: Mapping[str, Any]) -> list[Any]:
    given = reward.get("functions") or ()
    return [one.get("function") if isinstance(one, dict) else getattr(one, "function", None) for one in given]


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """None where it is no mapping yet to be read."""
    found = tree.get(key)
    return found if isinstance(found, dict) else None
