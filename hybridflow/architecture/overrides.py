"""Fields of config.json that a role's `hf_overrides` takes the place of: the number of positions, and their angles.

They change no shape of a weight. The file's other fields stay as they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.architecture.family import POSITIONS
from hybridflow.architecture.rope import KINDS, ORIGINAL, YARN_NUMBERS, YARN_NUMBERS_OR_NULL, Refuse, rope_object
from hybridflow.formats.json_text import parse_json

Json = dict[str, Any]
ROPES = ("rope_parameters", "rope_scaling")
YARN = (*YARN_NUMBERS, *YARN_NUMBERS_OR_NULL, "truncate")
# what says how positions are scaled: of the file's rope all else is kept, such as how many of a head's dimensions turn
SCALING = {"rope_type", "type", "attn_factor", *YARN, *(key for keys in KINDS.values() for key in keys)}


def overriding_fields(raw: Json, overrides: Mapping[str, Any], refuse: Refuse, *, nested: str | None) -> Json:
    """What config.json has in place of its own fields, by name; None takes the field out.

    raw: the file. nested: under which word the file may have the rope of layers without windows. Errors: those of
    `refuse`.
    """
    found = {POSITIONS: overrides[POSITIONS]} if POSITIONS in overrides else {}
    rope = rope_object(dict(overrides), refuse)
    if not rope:
        return found
    _check_names(rope, refuse)
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    old = raw.get(name) or {}
    if nested is not None and nested in old:
        new = old | {nested: _kept(old[nested] or {}) | rope}
    else:
        new = _kept(old) | rope
    # what stands beside it would differ, and some of it would be preferred
    fields = found | {key: None for key in (*ROPES, ORIGINAL) if key in raw} | {name: new}
    return fields | {key: new[key] for key in ("rope_theta",) if key in raw and key in new and nested is None}


def position_fields(path: Path) -> Json:
    """What the config.json in `path` says of positions, for a config.json that says otherwise."""
    raw = parse_json((path / "config.json").read_bytes(), f"{path}: ")
    return {key: raw.get(key) for key in (POSITIONS, *ROPES, ORIGINAL, "rope_theta")}


def _kept(rope: Json) -> Json:
    return {key: value for key, value in rope.items() if key not in SCALING}


def _check_names(rope: Json, refuse: Refuse) -> None:
    """Refuse what the rotary embedding would pass over."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in list(KINDS):
        return  # who reads the rope refuses it
    known = ["rope_type", "rope_theta", *KINDS[kind], *(YARN if kind == "yarn" else ())]
    for key, value in rope.items():
        refuse(key, value, key not in (*known, "type"), f"fields of rope_type {kind} are {', '.join(known)}")
    given = kind != "yarn" or ORIGINAL in rope
    refuse(f"{ORIGINAL} of rope_type yarn", None, not given, "must be the positions that the model was trained on")
