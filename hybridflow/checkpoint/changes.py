"""What another config, other files and another version mean for a run that goes on: one table says what may change.

    found = changes(saved, config.model_dump(mode="json"), next_iteration=13)
    found.refuse()                       # ConfigError for what may not change
    for line in found.lines():           # actor.optimizer.lr: 0.0003 -> 0.0001  (takes effect from iteration 13 on)
        recorder.message(line)

A run is resumed where it is, or forked: another run begins with the weights. A fork may change more. Data,
tokenizer and model configs are compared by content (`content_changes`), so files may move. Pure: trees in, differences
out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hybridflow.checkpoint.change_rules import (
    CONTENTS,
    FREE,
    MODELS,
    NOTICED,
    REFUSED,
    TABLE,
    TRAINED,
    UNKNOWN,
    ChangeRule,
    Effect,
)
from hybridflow.config import OptimizerConfig
from hybridflow.config.algorithms import ALGORITHMS, PPO
from hybridflow.config.fixed_algorithms import FIXED_ALGORITHMS
from hybridflow.config.keys import is_named, sections_in
from hybridflow.config.kinds import config_class
from hybridflow.config.losses import Importance, with_importance
from hybridflow.config.old_keys import with_new_names
from hybridflow.config.section import Section
from hybridflow.errors import ConfigError
from hybridflow.formats.weights_digest import WEIGHTS_OF
from hybridflow.models.optimizer import learning_rate

Tree = Mapping[str, Any]
NOT_THERE, GIVEN = "not there", "given"  # in the place of a value: of a key, of a section


@dataclass(frozen=True)
class Change:
    key: str
    before: Any
    after: Any
    rule: ChangeRule
    effect: Effect
    why: str  # the rule's, or what it comes to here


@dataclass(frozen=True)
class Changes:
    """Differences between what a checkpoint was written with and what it is loaded with, in the order of the config."""

    found: tuple[Change, ...]
    next_iteration: int
    fork: bool

    def __contains__(self, key: str) -> bool:
        return any(change.key == key for change in self.found)

    def lines(self) -> list[str]:
        """Every difference, and what it means where it means anything."""
        return [f"{_difference(change)}{self._meaning(change)}" for change in self.found]

    def refuse(self) -> None:
        """Raise ConfigError if anything changed that may not: all of it, with both values and the rule."""
        refused = [change for change in self.found if change.effect is REFUSED]
        if not refused:
            return
        lines = [f"{_difference(change)}: {change.why}" for change in refused]
        where = "a fork" if self.fork else "a resumed run"
        raise ConfigError("\n".join([f"what may not change in {where}:", *lines, self._way_out(refused)]))

    def _meaning(self, change: Change) -> str:
        why = f": {change.why}" if change.why else ""
        if change.rule is UNKNOWN:
            return f"  ({change.why})"
        if change.effect is NOTICED:
            return f"  (takes effect from iteration {self.next_iteration} on{why})"
        return f"  (may not change{why})" if change.effect is REFUSED else ""

    def _way_out(self, refused: list[Change]) -> str:
        if not self.fork and all(change.rule.fork is not REFUSED for change in refused):
            return (
                "give the former values, or start a fork: another name, and checkpoint.load: RUN_DIR. A fork may "
                "change these keys"
            )
        return "give the former values, or start anew with checkpoint.load: none"


def changes(saved: Tree, now: Tree, *, next_iteration: int, fork: bool = False) -> Changes:
    """Between two resolved configs, as `config.model_dump(mode="json")` gives them or config.yaml has them.

    saved may be of another version: a missing key has the default, and an unknown key is shown.
    next_iteration: the first iteration under the new config.
    """
    before, after = flat_config(saved), flat_config(now)
    found: list[Change] = []
    shown: list[str] = []
    for key in [*after, *(key for key in before if key not in after)]:
        old, new = before.get(key, NOT_THERE), after.get(key, NOT_THERE)
        if old == new or any(key.startswith(f"{up}.") for up in shown) or _of_one_algorithm(key, before, after):
            continue
        rule = rule_of(key)
        shown.append(key)
        effect, why = _judged(key, rule, before, after, next_iteration=next_iteration, fork=fork)
        found.append(Change(key, old, new, rule, effect, why=why))
    return Changes(tuple(found), next_iteration, fork)


def content_changes(
    saved: Mapping[str, str], now: Mapping[str, str], *, next_iteration: int, fork: bool = False
) -> Changes:
    """Between the digests, in hex, of what two starts of a run have read; names as `data.digests.run_digests` has them.

    The digest of the config itself is left out: `changes` names the keys that differ.
    """
    found = []
    for name in saved:
        if name in now and saved[name] != now[name] and name != "the config":
            rule = next((rule for rule in CONTENTS if any(fnmatchcase(name, key) for key in rule.keys)), UNKNOWN)
            before, after = _readable(saved[name]), _readable(now[name])
            found.append(Change(name, before, after, rule, rule.effect(fork=fork), why=rule.why))
    return Changes(tuple(found), next_iteration, fork)


def not_compared(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each model that both starts have, and whose weights the first has no digest of."""
    return [
        f"{name}: the checkpoint does not say which they were, and a change would not be noticed"
        for name in now
        if name.startswith(WEIGHTS_OF) and name not in saved and name.replace(WEIGHTS_OF, "config.json of ") in saved
    ]


def rule_of(key: str) -> ChangeRule:
    """The rule whose pattern names the most parts of the key without a wildcard; UNKNOWN where none matches."""
    matching = [(pattern, rule) for rule in TABLE for pattern in _patterns(rule) if _matches(key, pattern)]
    return max(matching, key=lambda found: found[0].count(".") - found[0].count("*"), default=("", UNKNOWN))[1]


def flat_config(tree: Tree) -> dict[str, Any]:
    """Path -> value of every key of the config, also of keys that `tree` lacks, and of keys that only `tree` has.

    A section has the value GIVEN; paths into a list of sections hold indices.
    """
    return dict(_flat(config_class(tree), _as_written_now(tree), ""))


# ------------------------------------------------------------------------------------------------ one key


DROPS = "data.overlong_prompts"


def _judged(
    key: str, rule: ChangeRule, before: Tree, after: Tree, *, next_iteration: int, fork: bool
) -> tuple[Effect, str]:
    """What the rule comes to with these two configs."""
    if before.get(key) == NOT_THERE:
        return NOTICED, "the version that saved did not have it"
    if key == "num_iterations":
        return rule.effect(fork=fork), _schedules(before, after, next_iteration)
    if key == "data.prompts_per_iteration" and after.get("rollout.partial") == GIVEN:
        return rule.effect(fork=fork), "the rows under way are dropped, and their prompts are not drawn again"
    if key == "data.max_prompt_length" and "drop" not in (before[DROPS], after[DROPS]):
        return FREE, ""
    if key == "algorithm.kl.coef" and after["algorithm.kl.controller"] == "fixed":
        return NOTICED, ""
    return rule.effect(fork=fork), rule.why


def _schedules(before: Tree, after: Tree, iteration: int) -> str:
    """What another number of iterations does to the rates of the trained models, by the new config's schedules."""
    old, new = before["num_iterations"], after["num_iterations"]
    if old is None or new is None:
        return "one of the two is of so many passes over the data; a schedule is that of the new length"
    if iteration > new:
        return f"all {new} iterations are done"
    names = [f"{name}.optimizer" for name in TRAINED if name in after and after[name] == GIVEN]
    return "; ".join(_schedule(name, after, old, new, iteration=iteration) for name in names)


def _schedule(name: str, config: Tree, old: int, new: int, *, iteration: int) -> str:
    fields = {key: config[f"{name}.{key}"] for key in OptimizerConfig.model_fields}
    optimizer = OptimizerConfig.model_validate(fields)
    if optimizer.schedule == "constant":
        return f"{name} has no schedule that ends"
    rate = (
        f"the {optimizer.schedule} schedule of {name} now ends at {new}: iteration {iteration} has the learning rate "
    )
    rate += f"{learning_rate(optimizer, iteration, new):.4g}"
    if iteration > old:
        return f"{rate}, after {learning_rate(optimizer, old, old):.4g} at the former end"
    return f"{rate} instead of {learning_rate(optimizer, iteration, old):.4g}"


def _of_one_algorithm(key: str, before: Tree, after: Tree) -> bool:
    """Whether a key is there because of one algorithm alone, where both have another."""
    other = before.get("algorithm.name") != after.get("algorithm.name")
    return other and key.startswith("algorithm.") and (key not in before or key not in after)


def _difference(change: Change) -> str:
    return f"{change.key}: {change.before} -> {change.after}"


def _readable(digest: str) -> str:
    """A version as it is; of other digests the first letters."""
    try:
        text = bytes.fromhex(digest).decode("ascii")
    except ValueError:
        return digest[:12]
    return text if text.isprintable() and text else digest[:12]


def _patterns(rule: ChangeRule) -> Iterator[str]:
    for key in rule.keys:
        first, _, rest = key.partition(".")
        names = {"MODEL": MODELS, "TRAINED": TRAINED}.get(first)
        yield from [key] if names is None else [f"{name}.{rest}" for name in names]


def _matches(key: str, pattern: str) -> bool:
    parts, wanted = key.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(want in ("*", part) for part, want in zip(parts, wanted, strict=True))


# ------------------------------------------------------------------------------------------------ a config, made flat


def _as_written_now(tree: Tree) -> Tree:
    """With the keys of an earlier version's resolved config where they are now."""
    tree, _ = with_new_names(dict(tree), "the checkpoint")
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, Mapping) or not isinstance(algorithm.get("policy"), Mapping):
        return tree
    policy = with_importance(algorithm["policy"])
    if policy.get("importance") is not None:
        policy["importance"] = Importance.model_validate(policy["importance"]).model_dump(mode="json")
    return {**tree, "algorithm": {**algorithm, "policy": policy}}


def _flat(model: type[BaseModel], tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        yield from _flat_field(field, tree.get(name, _default(field)), f"{prefix}{name}")
    for name, value in tree.items():
        if name not in model.model_fields:
            yield f"{prefix}{name}", _plain(value)


def _flat_field(field: FieldInfo, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    sections = sections_in(field.annotation)
    named = tuple(section for section in sections if is_named(section, field.annotation))
    if sections and isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _flat_section(sections, item, f"{path}.{i}")
    elif named and isinstance(value, Mapping) and all(isinstance(item, Mapping) for item in value.values()):
        yield path, GIVEN
        for name, item in value.items():
            yield from _flat_section(named, item, f"{path}.{name}")
    elif sections:
        yield from _flat_section(sections, value, path)
    else:
        yield path, _plain(value)


def _flat_section(sections: tuple[type[Section], ...], value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, _plain(value)
        return
    yield path, GIVEN
    yield from _flat(_section_of(sections, value), value, f"{path}.")


def _section_of(sections: tuple[type[Section], ...], value: Tree) -> type[Section]:
    """Among several sections, `name` finds an algorithm, and the keys find a source of data."""
    known = {**ALGORITHMS, **FIXED_ALGORITHMS}
    if len(sections) > 1 and set(sections) <= set(known.values()):
        return known.get(str(value.get("name")), PPO)
    fitting = [section for section in sections if value.keys() <= section.model_fields.keys()]
    return fitting[0] if fitting else sections[0]


def _default(field: FieldInfo) -> Any:
    """As a dumped config has it."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return NOT_THERE
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else default


def _plain(value: Any) -> Any:
    """As JSON and YAML have it, either of which the saved config may have come through."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
