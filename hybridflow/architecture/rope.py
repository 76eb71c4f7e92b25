"""Rotary embedding as config.json says it: which scaling, and the frequencies and the factor that come of it.

angles = position x frequencies; queries and keys turn by factor x (cos, sin) of them, as `models.attention` does it.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from hybridflow.formats.json_text import parse_json

ORIGINAL = "original_max_position_embeddings"
KINDS = {  # of rotary scaling -> the numbers that each needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor",),
}
# What transformers and vLLM read beside them. Neither reads attn_factor, which some files say: the factor is then made
# of `factor` alone.
YARN_NUMBERS = (ORIGINAL, "beta_fast", "beta_slow")
YARN_NUMBERS_OR_NULL = ("attention_factor", "mscale", "mscale_all_dim")
Refuse = Callable[[str, object, bool, str], None]  # (key, value, whether, the rule it breaks)
Rope = tuple[tuple[str, Any], ...]


class Rotary(NamedTuple):
    """What queries and keys are turned by."""

    frequencies: Tensor  # (rotary dimensions / 2,) float32
    factor: float  # of cosines and sines


class QueryGrowth(NamedTuple):
    """Of queries with their positions: by beta each time the logarithm of position / length grows by 1."""

    beta: float
    length: int

    @property
    def engines_fields(self) -> dict[str, Any]:
        """How vLLM 0.32.0 is told of it in config.json, beside the rope_parameters that transformers reads."""
        return {"llama_4_scaling": {ORIGINAL: self.length, "beta": self.beta}}


def rope_object(raw: dict[str, Any], refuse: Refuse) -> dict[str, Any]:
    """What config.json says of it, under the name of transformers 5 or an older one."""
    given = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    for key, rope in given.items():
        refuse(key, rope, not isinstance(rope, dict), "must be an object")
    found = list(given.values())
    refuse("rope_scaling", found[-1:], len(found) > 1 and found[0] != found[1], "rope_parameters differs")
    return found[0] if found else {}


def read_rope(raw: dict[str, Any], refuse: Refuse, *, theta: float, positions: int) -> Rope:
    """By name, checked: the kind, theta, and what the kind has.

    theta: what a missing one means. positions: the model's, which a missing ORIGINAL of yarn means.

    What depends on the length of a sequence (dynamic, longrope) is not read: vLLM computes it otherwise than
    transformers does.
    """
    rope = rope_object(raw, refuse)
    kind = rope.get("rope_type", rope.get("type", "default"))  # older files say "type"
    refuse("rope_type", kind, not (isinstance(kind, str) and kind in KINDS), f"known are {', '.join(KINDS)}")
    if ORIGINAL in raw:  # transformers prefers it to the one inside
        rope = rope | {ORIGINAL: raw[ORIGINAL]}
    if kind == "yarn":
        rope = {ORIGINAL: positions} | rope
    for key in KINDS[kind]:
        value = rope.get(key)
        refuse(f"{key} of rope_type {kind}", value, not is_number(value) or value <= 0, "must be positive")
    theta = rope.get("rope_theta", raw.get("rope_theta", theta))
    refuse("rope_theta", theta, not is_number(theta) or theta <= 0, "must be positive")
    more = _read_yarn(rope, refuse) if kind == "yarn" else ()
    return (("rope_type", kind), ("rope_theta", theta), *((key, rope[key]) for key in KINDS[kind]), *more)


def _read_yarn(rope: dict[str, Any], refuse: Refuse) -> Rope:
    for key in (*YARN_NUMBERS, *YARN_NUMBERS_OR_NULL):
        value = rope.get(key)
        good = (is_number(value) and value > 0) or key not in rope
        if key in YARN_NUMBERS_OR_NULL:
            refuse(f"{key} of rope_type yarn", value, not good and value is not None, "must be positive, or null")
        else:
            refuse(f"{key} of rope_type yarn", value, not good, "must be positive")
    truncate = rope.get("truncate", True)
    refuse("truncate of rope_type yarn", truncate, not isinstance(truncate, bool), "must be true or false")
    named = (*YARN_NUMBERS, *YARN_NUMBERS_OR_NULL, "truncate")
    return tuple((key, rope[key]) for key in named if rope.get(key) is not None)


def num_angles(rope: Rope) -> int | None:
    """Positions that vLLM has angles for; None: as many as the model knows."""
    fields = dict(rope)
    if fields.get("rope_type") != "yarn" or ORIGINAL not in fields:
        return None
    return int(fields["factor"] * fields[ORIGINAL])


def rotary(config: Any, head_dim: int, dim: int, *, layers: str | None = None) -> Rotary:
    """As transformers computes it for a model of this config, of whose heads `dim` dimensions turn.

    layers: whose, by the word of layer_types, where not all layers turn alike.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters if layers is None else config.rope_parameters[layers]
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        theta: float = rope["rope_theta"]
        return Rotary(1.0 / theta**exponents, 1.0)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = head_dim  # Mixtral's null would be multiplied
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    if layers is not None:
        return Rotary(*compute(config, "cpu", layer_type=layers))
    return Rotary(*compute(config, "cpu"))


def text_config(path: Path, overriding: dict[str, Any]) -> Any:
    """transformers' config of the language model in `path`, with these fields in place of the file's."""
    from transformers import AutoConfig

    config = own_config(path) or AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    config = config.get_text_config()
    if not overriding:
        return config
    raw = parse_json((path / "config.json").read_bytes(), f"{path}: ")
    return type(config).from_dict(deepcopy(with_fields(raw.get("text_config", raw), overriding)))


def with_fields(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """config.json with these fields; None takes a field out."""
    return {key: x for key, x in (raw | fields).items() if x is not None or key not in fields}


def own_config(path: Path) -> Any | None:
    """transformers' reading of config.json with a model type that it has under another name alone; None: it has it."""
    from transformers import DeepseekV3Config

    raw = parse_json((path / "config.json").read_bytes(), f"{path}: ")
    if raw.get("model_type") != "kimi_k2":
        return None
    return DeepseekV3Config.from_dict(raw | {"model_type": "deepseek_v3"})


def attention_scale(rope: Rope, head_dim: int) -> float:
    """head_dim^-1/2, times the square of YaRN's factor for all dimensions, as DeepSeek-V3 has it."""
    fields = dict(rope)
    scale, all_dim = float(head_dim**-0.5), fields.get("mscale_all_dim")
    if fields["rope_type"] != "yarn" or not all_dim or fields["factor"] <= 1:
        return scale
    of_yarn: float = 0.1 * all_dim * math.log(fields["factor"]) + 1
    return scale * of_yarn**2


def is_number(value: object) -> TypeGuard[int | float]:
    """Finite, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
