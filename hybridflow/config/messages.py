"""What is wrong with a config, for a person: the key, the value, the rule, and the nearest known key."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.fixed_algorithms import FIXED_ALGORITHMS
from hybridflow.config.old_keys import MOVED
from hybridflow.config.other_trainers import NOT_QUANTISED, algorithm_hint, hint, is_quantisation, leaves
from hybridflow.config.sampling import REPLACED, PromptLengthConfig, SamplingConfig
from hybridflow.errors import Mendable


def explanation(error: ValidationError, model: type[BaseModel], path: str | Path) -> str:
    lines = []
    for problem in error.errors():
        location = _without_tag(problem["loc"])
        key = ".".join(str(part) for part in location) or "config"
        if problem["type"] == "extra_forbidden":
            lines += _unknown(model, problem["loc"], problem["input"])
        elif problem["type"] == "missing":
            lines.append(f"{key}: is required")
        elif problem["type"] == "union_tag_invalid":
            lines.append(f"{key}.name = {problem['ctx']['tag']!r}: {_no_algorithm(problem['ctx']['tag'])}")
        elif problem["type"] == "value_error":
            raised, place = problem["ctx"]["error"], key if location else ""
            text = raised.at(place) if isinstance(raised, Mendable) else str(raised)
            lines.append(f"{key}: {text}" if location else text)
        else:
            reason = f"; {NOT_QUANTISED}" if is_quantisation(str(problem["input"])) else ""
            lines.append(f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}{reason}")
    return "\n".join(f"{path}: {line}" for line in lines)


EVERY_ALGORITHM = {**ALGORITHMS, **FIXED_ALGORITHMS}


def _without_tag(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """pydantic names the kind of algorithm in between: algorithm.ppo.gamma."""
    tagged = len(location) > 1 and location[0] == "algorithm" and location[1] in EVERY_ALGORITHM
    return (location[0], *location[2:]) if tagged else location


def _no_algorithm(name: object) -> str:
    if name in FIXED_ALGORITHMS:
        return "this algorithm trains on fixed data. hybridflow.train and FixedDataTrainer.from_yaml read such a config"
    return f"is no algorithm; {_closest(name)}"


def _closest(name: object) -> str:
    lower = str(name).lower()
    foreign = algorithm_hint(lower)
    if foreign is not None:
        return foreign
    close = nearest(lower, EVERY_ALGORITHM, cutoff=0.5)
    return f"did you mean {close}?" if close else f"known are {', '.join(EVERY_ALGORITHM)}"


def nearest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """What a person has meant: a name of the same letters, else one that looks alike; None where none does."""
    names = list(known)
    close = [name for name in names if sorted(name) == sorted(given)]
    close += difflib.get_close_matches(given, names, n=1, cutoff=cutoff)
    return close[0] if close else None


# from which of difflib's ratios on, and up to how many letters more or less, a key is a slip of the pen; what is less
# like ours may be another trainer's
SLIP, MISSING = 0.88, 2


def _unknown(model: Any, location: tuple[int | str, ...], value: Any) -> list[str]:
    """A line for the unknown key; of a section of another trainer's, for each key in it."""
    path = tuple(map(str, _without_tag(location)))
    nearest, is_close = _nearest(model, location)
    fixed = "sampling" not in model.model_fields  # a config on fixed data
    found = [] if is_close else leaves(value, path, fixed=fixed)
    within = [(".".join(leaf), hint(leaf, fixed=fixed)) for leaf in found]
    if not any(said for _, said in within):
        return [f"{'.'.join(path)}: unknown key; {nearest}"]
    others = [key for key, said in within if not said]
    rest = [f"{'.'.join(path)}: {len(others)} more unknown keys in it: {', '.join(others[:3])}, ..."]
    lines = [f"{key}: unknown key; {said}" for key, said in within if said]
    return lines + (rest if len(others) > 3 else [f"{key}: unknown key" for key in others])


def _nearest(model: Any, location: tuple[int | str, ...]) -> tuple[str, bool]:
    """`did you mean x?` out of the keys of the section that `location` lies in; whether it is a slip of the pen."""
    for part in location[:-1]:
        if model is None:
            model = EVERY_ALGORITHM[str(part)]
        elif isinstance(part, str):
            model = None if part == "algorithm" else _section_of(model.model_fields[part].annotation)
    key, known = str(location[-1]), list(model.model_fields)
    if model is PromptLengthConfig and key in SamplingConfig.model_fields:
        return f"it is one for all prompts; what may go by their length is {', '.join(REPLACED)}", True
    moved = MOVED if location[0] == "algorithm" and len(location) == 3 else {}
    if key in moved:
        return f"it is now algorithm.{moved[key]}", True
    close = difflib.get_close_matches(key, [*known, *moved], n=1, cutoff=0.5)
    if not close:
        return f"known are {', '.join(known)}", False
    likeness = difflib.SequenceMatcher(None, key, close[0]).ratio()
    is_slip = likeness >= SLIP and abs(len(key) - len(close[0])) <= MISSING
    return f"did you mean {moved.get(close[0], close[0])}?", is_slip


def _section_of(annotation: Any) -> Any:
    """The section class inside an annotation such as tuple[Section, ...] or Section | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section_of(argument) for argument in getattr(annotation, "__args__", ()) if argument is not Ellipsis)
    return next((section for section in inner if section is not None), None)
