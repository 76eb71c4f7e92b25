"""What keys of verl, TRL, OpenRLHF and NeMo-RL are called here, for the error that an unknown key of a config gives.

    hint(("actor", "kl_loss_coef"))    "here it is algorithm.kl.coef"
    hint(("actor", "fsdp_config"))     "there is none here: ..."
    hint(("actor", "lerning_rate"))    None

The names are in other_trainers.yaml, and are names alone: nothing of another trainer's config is read, since values
differ in unit and meaning, which the notes tell.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.files import read_tree

_QUANTISATION = r"(?<![a-z])(mx|nv)?(fp|float|int)[48](?!\d)|quanti[sz]|quant_|kv_cache_dtype|kv_scales|in_[48]bit"
NOT_QUANTISED = "FP8 and other quantised formats are not supported, neither in weights and KV cache nor in training: "
NOT_QUANTISED += "trainer and engine share one copy of the weights, in ROLE.dtype, and their log-probs are compared"
NOTHING_ON_FIXED_DATA = "there is none here: this algorithm trains on the rows of files and generates nothing"
NOT_HERE = ("orpo", "simpo", "online_dpo")  # algorithms that learn from pairs


@dataclass(frozen=True)
class ForeignKeys:
    """Keys of other trainers' configs of one kind of run. rows: (ours, theirs, note); table: theirs -> (ours, note)."""

    roles: Mapping[str, str]
    rows: tuple[tuple[str, str, str], ...]
    table: Mapping[str, tuple[str, str]]


@functools.cache
def _read() -> dict[str, Any]:
    return read_tree(Path(__file__).with_suffix(".yaml"))


@functools.cache
def other_keys(*, fixed: bool = False) -> ForeignKeys:
    """fixed: those of configs on fixed data, beside which the others hold too."""
    tree = _read()["fixed_data" if fixed else "generation"]
    rows = tuple((row.get("ours", ""), row["theirs"], row.get("note", "")) for row in tree["rows"])
    table = {key: (ours, note) for ours, theirs, note in rows for key in theirs.split()}
    return ForeignKeys(tree["roles"], rows, table)


def algorithm_names() -> Mapping[str, str]:
    """What other trainers call an algorithm -> algorithm.name."""
    names: dict[str, str] = _read()["algorithms"]
    return names


def hint(path: Sequence[str], *, fixed: bool = False) -> str | None:
    """What to use instead of the key at `path`; None where no trainer that we know has it, or it is ours already.

    fixed: in a config on fixed data.
    """
    words = [word for word in path if not word.isdecimal()]  # without the places in lists
    for start in range(len(words)):
        key = ".".join(words[start:])
        own = other_keys(fixed=True).table.get(key) if fixed else None
        found = own or other_keys().table.get(key)
        if found is not None:
            ours, note = (_of_role(text, path, fixed=fixed) for text in found)
            if ".".join(path) in (key.partition("=")[0] for key in ours.split()):
                return None  # ours, in an algorithm that does without
            if fixed and own is None and any(_is_absent(key) for key in ours.split()):
                return NOTHING_ON_FIXED_DATA
            return note if not ours else f"here it is {' and '.join(ours.split())}" + (f" ({note})" if note else "")
    return NOT_QUANTISED if any(map(is_quantisation, path)) else None


def is_quantisation(name: str) -> bool:
    """Whether the name of a key, or of a number format, is of FP8 or another quantised format."""
    return re.search(_QUANTISATION, name, re.IGNORECASE) is not None


def _is_absent(key: str) -> bool:
    """Of a key of ours: whether no config on fixed data has it."""
    is_role = key.split(".")[0] == "reward_model"
    return not is_role and f"{key.rstrip('=')}=".startswith(tuple(_read()["absent_on_fixed_data"].split()))


def algorithm_hint(name: str) -> str | None:
    """What to use instead of another trainer's name of an algorithm; None where there is no such name."""
    key = name.lower().replace("-", "_")
    if key in NOT_HERE:
        return "there is none here: of pairs dpo learns, with loss: ipo as well"
    found = algorithm_names().get(key)
    return None if found is None else f"here it is {found}"


def leaves(tree: object, path: tuple[str, ...], *, fixed: bool = False) -> Iterator[tuple[str, ...]]:
    """The path of each key in nested mappings at `path` that `hint` knows, or that holds no further ones.

    A known section stands for all keys in it but those that the table names together with the section.
    """
    within = tree if isinstance(tree, Mapping) else {}
    is_known = hint(path, fixed=fixed) is not None
    own = [
        key for key in within if not is_known or f"{path[-1]}.{key}" in other_keys().table or is_quantisation(str(key))
    ]
    for key in own:
        yield from leaves(within[key], (*path, str(key)), fixed=fixed)
    if len(own) < len(within) or not within:
        yield path


def _of_role(text: str, path: Sequence[str], *, fixed: bool) -> str:
    """`text` with the role that the path speaks of, where that has the key; else the actor's."""
    sections = [part for part in path[:-1] if part != "actor_rollout_ref"]  # which holds all three
    roles = other_keys(fixed=fixed).roles
    role = next((role for word, role in roles.items() if word in sections), "actor")

    def named(found: re.Match[str]) -> str:
        known = _read()["of_the_engine" if role == "rollout" else "of_any_model"].split()
        has = role in ("actor", "critic", "reward_model") or found[1] in known
        return f"{role if has else 'actor'}.{found[1]}"

    return re.sub(r"ROLE\.(\w+)", named, text)
