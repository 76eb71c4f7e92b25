"""The fields of a model's config.json that say how each layer attends: windows, rotary embeddings, the scale."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridflow.architecture.family import Family
from hybridflow.architecture.layer_kinds import MixerName
from hybridflow.architecture.rope import ORIGINAL, QueryGrowth, Refuse, Rope, is_number, read_rope, rope_object

FULL, SLIDING = "full_attention", "sliding_attention"  # words of layer_types
Size = Callable[[str], int]  # a positive whole number of config.json


@dataclass(frozen=True)
class AttentionFields:
    """Of one config.json. refuse, size: of `config_fields.ConfigFields`. window: as it counts, if any."""

    raw: dict[str, Any]
    family: Family
    refuse: Refuse
    size: Size
    num_layers: int
    window: int | None

    def read(self, positions: int) -> dict[str, Any]:
        """The fields of `ModelSpec`. Errors: CheckpointError."""
        mixers = self._mixers()
        rope, window_rope = self._ropes(positions)
        key = self.family.attention.scale_key
        return {
            "mixers": mixers,
            "rope": rope,
            "window_rope": window_rope if "window" in mixers and window_rope != rope else (),
            "query_growth": self._query_growth(rope) if self.family.attention.grows else None,
            "given_scale": self.size(key) ** -0.5 if key else None,
        }

    def _mixers(self) -> tuple[MixerName, ...]:
        """Of each layer; (): plain attention in all of them."""
        windows = self.family.windows
        if windows is not None and windows.layers == "layer_types":
            kinds = self._layer_types(self.size("sliding_window_pattern"))
            self.refuse("sliding_window", None, SLIDING in kinds and self.window is None, "some layers have windows")
            mixers: dict[str, MixerName] = {SLIDING: "window", FULL: "attention"}
            return tuple(mixers[kind] for kind in kinds)
        if self.family.mixer == "unturned":
            return self._unturned()
        everywhere = windows is not None and windows.layers == "all" and self.window is not None
        return tuple("window" for _ in range(self.num_layers if everywhere else 0))

    def _layer_types(self, interval: int) -> list[str]:
        """interval: how often there is full attention, where the file does not say it."""
        kinds: Any = self.raw.get("layer_types")
        if kinds is None:
            return [SLIDING if (layer + 1) % interval else FULL for layer in range(self.num_layers)]
        check_layer_types(kinds, (FULL, SLIDING), self.num_layers, self.refuse)
        return list(kinds)

    def _unturned(self) -> tuple[MixerName, ...]:
        """By no_rope_layers, which has a 1 for each layer that turns queries and keys."""
        turning: Any = self.raw.get("no_rope_layers")
        if turning is None:
            interval = self.size("no_rope_layer_interval")
            turning = [int((layer + 1) % interval != 0) for layer in range(self.num_layers)]
        known = self._is_of_layers(turning) and all(turns in (0, 1) for turns in turning)
        self.refuse("no_rope_layers", turning, not known, f"must be 1 or 0 for each of {self.num_layers} layers")
        kinds = self.raw.get("layer_types")
        if kinds is not None:
            check_layer_types(kinds, (FULL,), self.num_layers, self.refuse)
        return tuple("attention" if turns else "unturned" for turns in turning)

    def _is_of_layers(self, found: object) -> bool:
        return isinstance(found, list) and len(found) == self.num_layers

    def _ropes(self, positions: int) -> tuple[Rope, Rope]:
        """Of layers with full attention, and of those with windows."""
        raw, traits, default = self.raw, self.family.rotation, self.family.default("rope_theta")
        if self.family.embedding.position_offset:
            return (), ()
        if not traits.by_layer:
            rope = self._rope(raw, default, positions)
            return rope, rope
        nested = raw.get("rope_parameters") or {}
        known = isinstance(nested, dict) and set(nested) <= {FULL, SLIDING}
        self.refuse("rope_parameters", nested, not known, f"must have {FULL} and {SLIDING}, each an object")
        for key in (FULL, SLIDING):
            part = nested.get(key) or {}
            self.refuse(f"rope_parameters.{key}", part, not isinstance(part, dict), "must be an object")
        scaling = raw.get("rope_scaling") or {}
        self.refuse("rope_scaling", scaling, not isinstance(scaling, dict), "must be an object")
        theta = raw.get("rope_theta", default)
        misread = not traits.window_theta_key and theta != traits.window_theta
        self.refuse("rope_theta", theta, misread, f"transformers takes {traits.window_theta} for layers with windows")
        full = {"rope_theta": theta} | (nested.get(FULL) or scaling)
        local = raw.get(traits.window_theta_key, traits.window_theta) if traits.window_theta_key else theta
        sliding = {"rope_theta": local} | (nested.get(SLIDING) or {})
        of_full = self._rope({"rope_parameters": full}, default, positions)
        return of_full, self._rope({"rope_parameters": sliding}, traits.window_theta, positions)

    def _query_growth(self, rope: Rope) -> QueryGrowth:
        beta = rope_object(self.raw, self.refuse).get("llama_4_scaling_beta")
        self.refuse("llama_4_scaling_beta", beta, not is_number(beta) or beta < 0, "must be a number from 0 on")
        assert isinstance(beta, int | float), "else it is refused"
        return QueryGrowth(float(beta), int(dict(rope)[ORIGINAL]))

    def _rope(self, raw: dict[str, Any], theta: float, positions: int) -> Rope:
        kinds, given = self.family.rotation.kinds, raw.get("rope_parameters") or raw.get("rope_scaling")
        self.refuse("rope_parameters", given, bool(kinds) and "default" not in kinds and not given, "must be given")
        rope = read_rope(raw, self.refuse, theta=theta, positions=positions)
        kind = dict(rope)["rope_type"]
        rule = f"must be {' or '.join(kinds)} in the family {self.family.name}"
        self.refuse("rope_type", kind, bool(kinds) and kind not in kinds, rule)
        return rope


def check_layer_types(kinds: Any, known: tuple[str, ...], num_layers: int, refuse: Refuse) -> None:
    """Refuse what does not say one of the known words for each layer."""
    refuse("layer_types", kinds, not isinstance(kinds, list), f"must be a list of {' and '.join(known)}")
    refuse("layer_types", "...", len(kinds) != num_layers, f"has {len(kinds)} entries for {num_layers} layers")
    for layer, kind in enumerate(kinds):
        refuse(f"layer_types.{layer}", kind, kind not in known, f"must be {' or '.join(known)}")
