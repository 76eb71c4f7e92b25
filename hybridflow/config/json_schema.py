"""The JSON schema (draft 2020-12) of config files, of either kind, for editors. Pure.

    hybridflow config schema > hybridflow/config/schema.json

What it says beyond the sections: `base` and what then may be missing, `auto` where `config.auto` takes it, keys by
their old names, sections of generation that are null in a config on fixed data, and pairs of keys that are refused. Of
other rules between keys it has none.
"""

import inspect
import json
from collections.abc import Collection, Mapping
from typing import Any

from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.auto import AUTO, ENGINE_KEYS, ROLE_KEYS, TRAINED_KEYS
from hybridflow.config.experiment import ExperimentConfig
from hybridflow.config.files import BASE
from hybridflow.config.fixed_algorithms import FIXED_ALGORITHMS
from hybridflow.config.fixed_data import OF_GENERATION, FixedDataConfig
from hybridflow.config.losses import PolicyLoss
from hybridflow.config.old_keys import ENV_VARS, MOVED, OLD_ENV_VARS
from hybridflow.config.refused_pairs import KeyCondition, pairs_of, refused_pairs
from hybridflow.config.section import Section

Schema = dict[str, Any]
ALGORITHMS_OF: dict[str, Mapping[str, type[Section]]] = {
    "ExperimentConfig": ALGORITHMS,
    "FixedDataConfig": FIXED_ALGORITHMS,
}
MAY_BE_AUTO = {
    "TrainedRoleConfig": TRAINED_KEYS,
    "RoleConfig": ROLE_KEYS,
    "RewardModelConfig": ROLE_KEYS,
    "RolloutConfig": ENGINE_KEYS,
}
ABOUT_BASE = (
    "Another config that this one builds on, as a path from this file's directory. "
    "Mappings merge by key; everything else, {} included, replaces what the base says."
)
ABOUT_ALGORITHM = "How the models are trained. The name chooses the keys of this section."
OF_NO_GENERATION = "null: an algorithm on fixed data generates nothing."
PAIRS = "Pairs"  # behind the name of a section: its pairs of keys that do not go together
NAMELESS = "PPOWithoutName"  # a section `algorithm` without a name is ppo's, with the old keys


def schema_text() -> str:
    """The schema as it is committed: one key a line, or one pair of keys."""
    schema, rows = config_schema(), dict[str, str]()
    for name, part in schema["$defs"].items():
        if name.endswith(PAIRS):
            rows[json.dumps(f"rows of {name}")] = ",\n   ".join(map(json.dumps, part["allOf"]))
            part["allOf"] = [f"rows of {name}"]
    text = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    for place, lines in rows.items():
        text = text.replace(place, lines)
    return text


def config_schema() -> Schema:
    """What a config file may say."""
    parts: Schema = {}
    for tree in (ExperimentConfig, FixedDataConfig):
        whole = tree.model_json_schema()
        parts |= whole.pop("$defs") | {tree.__name__: whole}
    needed = {name: _required(parts[name], parts) for name in ALGORITHMS_OF}
    needed["ExperimentConfig"]["properties"]["algorithm"] = _algorithm_without_base(parts)
    for name, part in parts.items():
        _tidy(name, part)
    _refuse_pairs(parts)
    _add_old_keys(parts)
    for name, algorithms in ALGORITHMS_OF.items():
        _add_algorithms(parts[name]["properties"], algorithms)
        parts[name]["properties"] = {BASE: {"type": "string", "description": ABOUT_BASE}, **parts[name]["properties"]}
    parts["FixedDataConfig"]["properties"] |= {
        key: {"type": "null", "description": OF_NO_GENERATION} for key in OF_GENERATION
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of hybridflow",
        "type": "object",
        "properties": {"algorithm": {"description": ABOUT_ALGORITHM, **_one_of({**ALGORITHMS, **FIXED_ALGORITHMS})}},
        "allOf": [*_of_either_kind(), {"if": {"required": [BASE]}, "else": _complete(needed)}],
        "$defs": dict(sorted(parts.items())),
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _one_of(names: Collection[str]) -> Schema:
    """A section `algorithm` whose name, if there is one, is one of these."""
    return {"properties": {"name": {"enum": list(names)}}}


def _trains_on_fixed_data() -> Schema:
    """That `algorithm.name` is there, and one on fixed data."""
    return {"properties": {"algorithm": _one_of(FIXED_ALGORITHMS) | {"required": ["name"]}}, "required": ["algorithm"]}


def _of_either_kind() -> list[Schema]:
    """By algorithm.name; without one it is ppo's, or on a base whatever the base is."""
    named = {"properties": {"algorithm": {"required": ["name"]}}, "required": ["algorithm"]}
    either = {"anyOf": [_ref(name) for name in ALGORITHMS_OF]}
    by_base = {"if": {"required": [BASE]}, "then": either, "else": _ref("ExperimentConfig")}
    by_name = {"if": _trains_on_fixed_data(), "then": _ref("FixedDataConfig"), "else": _ref("ExperimentConfig")}
    return [{"if": named, "then": by_name, "else": by_base}]


def _complete(needed: Mapping[str, Schema]) -> Schema:
    """What has to be there where no base has it."""
    return {
        "if": _trains_on_fixed_data(),
        "then": needed["FixedDataConfig"],
        "else": needed["ExperimentConfig"],
    }


# ------------------------------------------------------------------------------------------------ what is required


def _required(part: Schema, parts: Mapping[str, Schema]) -> Schema:
    """What a section has to have, and the sections in it."""
    found: Schema = {"required": part["required"]} if "required" in part else {}
    inner = {key: needed for key, value in part.get("properties", {}).items() if (needed := _needed_in(value, parts))}
    return found | ({"properties": inner} if inner else {})


def _needed_in(value: Schema, parts: Mapping[str, Schema]) -> Schema:
    """The same of a key's value: a section, one of several kinds of sections, or each of a list."""
    kinds = (value, *value.get("anyOf", ()))
    sections = [_required(parts[each["$ref"].rpartition("/")[2]], parts) for each in kinds if "$ref" in each]
    lists = [_needed_in(each["items"], parts) for each in kinds if isinstance(each.get("items"), dict)]
    found: Schema = {"items": lists[0]} if any(lists) else {}
    if all(sections):
        found |= {"anyOf": sections} if len(sections) > 1 else (sections or [{}])[0]
    return found


def _algorithm_without_base(parts: Mapping[str, Schema]) -> Schema:
    """A flow of the user's own has required keys; a section without a name is ppo's."""
    custom = {"if": {"properties": {"name": {"const": "custom"}}}, "then": _required(parts["Custom"], parts)}
    return {"if": {"required": ["name"]}, "then": custom, "else": _ref(NAMELESS)}


# ------------------------------------------------------------------------------------------------ sections


def _add_algorithms(properties: Schema, algorithms: Mapping[str, type[Section]]) -> None:
    """The section `algorithm`, by name."""
    by_name = [
        {"if": _one_of([name]) | {"required": ["name"]}, "then": _ref(section.__name__)}
        for name, section in algorithms.items()
    ]
    any_of = [_ref(section.__name__) for section in algorithms.values()]
    nameless = [_ref(NAMELESS), *any_of] if algorithms is ALGORITHMS else any_of
    properties["algorithm"] = {
        "description": properties["algorithm"]["description"],
        "type": "object",
        **_one_of(algorithms),
        "allOf": [*by_name, {"if": {"required": ["name"]}, "else": {"anyOf": nameless}}],
    }


def _refuse_pairs(parts: Schema) -> None:
    """Where a file names both keys: nothing is known here of defaults, nor of a base's keys."""
    of_sections = {kind.__name__: pairs_of(kind) for kind in _kinds_of(Section) if kind.__name__ in parts}
    for name, pairs in of_sections.items():
        if pairs:
            parts[name]["allOf"] = [_ref(f"{each}{PAIRS}") for each in dict.fromkeys(pair.section for pair in pairs)]
    for pair in refused_pairs():
        sides = [_any_of(side) for side in (*pair.sides, *((each,) for each in pair.where))]
        # errorMessage: of VS Code and of its extension for YAML
        refused = {"not": {"allOf": sides}, "errorMessage": pair.reason}
        parts.setdefault(f"{pair.section}{PAIRS}", {"allOf": []})["allOf"].append(refused)


def _any_of(side: tuple[KeyCondition, ...]) -> Schema:
    return {"anyOf": list(map(_of_condition, side))} if len(side) > 1 else _of_condition(side[0])


def _of_condition(condition: KeyCondition) -> Schema:
    """That the key is there, with a value that meets the condition."""
    values = list(condition.values)
    nothing: list[Any] = [None, False, 0, "", []]
    match condition.sign:
        case "no":
            found: Schema = {"enum": nothing}
        case "=":
            found = {"enum": values}
        case "!=":
            found = {"not": {"enum": [*values, AUTO]}}
        case ">":
            found = {"type": "number", "exclusiveMinimum": values[0]}
        case _:
            found = {"not": {"enum": [*nothing, AUTO]}}
    for name in reversed(condition.key.split(".")):
        inside: Schema = {"type": "object", "properties": {name: found}, "required": [name]}
        found = {"type": "array", "contains": found} if name == "0" else inside
    return found


def _add_old_keys(parts: Schema) -> None:
    """Keys by their former names, where they are still read."""
    for name in ALGORITHMS_OF:
        properties = parts[name]["properties"]
        properties[OLD_ENV_VARS] = _former(properties[ENV_VARS], ENV_VARS)
    policies = [each.__name__ for each in _kinds_of(PolicyLoss) if each.__name__ in parts]
    cap = _former(parts["Importance"]["properties"]["cap"], "importance.cap")
    for name in policies:
        parts[name]["properties"]["importance_cap"] = cap
    moved = {key: _former(_key_schema(parts, place), place) for key, place in MOVED.items()}
    parts[NAMELESS] = parts["PPO"] | {"properties": parts["PPO"]["properties"] | moved}


def _former(value: Schema, name: str) -> Schema:
    rest: Schema = {key: part for key, part in value.items() if key not in ("description", "default")}
    return rest | {"description": f"A former name of {name}.", "deprecated": True}


def _key_schema(parts: Schema, key: str) -> Schema:
    """The schema of a key of ppo, such as policy.clip_range."""
    sections = {"policy": "PolicyLoss", "update": "Update", "importance": "Importance"}
    section, _, last = key.rpartition(".")
    found: Schema = parts[sections[section.rpartition(".")[2]]]["properties"][last]
    return found


def _kinds_of(section: type[Section]) -> list[type[Section]]:
    return [section, *(kind for each in section.__subclasses__() for kind in _kinds_of(each))]


def _tidy(name: str, part: Schema) -> None:
    """A section as it stands in a file: what it requires is said elsewhere, since a base may have it."""
    algorithms = {section.__name__: section for each in ALGORITHMS_OF.values() for section in each.values()}
    part.pop("required", None)
    part.pop("description", None)
    _strip(part)
    if name in algorithms:
        part["description"] = (inspect.getdoc(algorithms[name]) or "").partition("\n")[0]
    for key in MAY_BE_AUTO.get(name, ()):
        part["properties"][key] = _or_auto(part["properties"][key])


def _strip(node: Any) -> None:
    """Without titles, which repeat keys, and defaults of whole sections, whose keys have their own."""
    if isinstance(node, list):
        for each in node:
            _strip(each)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("title"), str):
        del node["title"]
    if isinstance(node.get("default"), dict) and node["default"]:
        del node["default"]
    if isinstance(node.get("description"), str):
        node["description"] = " ".join(node["description"].split())
    if "patternProperties" in node:
        node["additionalProperties"] = False
    for each in node.values():
        _strip(each)


def _or_auto(value: Schema) -> Schema:
    about: Schema = {key: value[key] for key in ("default", "description") if key in value}
    bare = {key: part for key, part in value.items() if key not in about}
    return {"anyOf": [*bare.get("anyOf", [bare]), {"const": AUTO}], **about}
