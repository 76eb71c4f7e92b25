"""The fields of a model's config.json, each checked as it is read: what `spec.read_spec` makes a `ModelSpec` of.

`AttentionFields` reads what says how each layer attends: windows, rotary embeddings, the scale.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.architecture.family import POSITIONS, ConfigFieldRule, ExpertTraits, Family
from hybridflow.architecture.latent_fields import check_rope, dense_layers, is_block_fp8, read_groups, read_latent
from hybridflow.architecture.layer_kinds import DeltaSizes, MixerName, RouterSizes
from hybridflow.architecture.overrides import overriding_fields
from hybridflow.architecture.rope import (
    ORIGINAL,
    QueryGrowth,
    Refuse,
    Rope,
    is_number,
    read_rope,
    rope_object,
    with_fields,
)
from hybridflow.architecture.tied_head import HEAD, has_own_head
from hybridflow.architecture.wrapper import wrapped_names
from hybridflow.errors import CheckpointError

LARGEST = 1 << 31  # no size of a model is beyond this; a damaged config.json may be
MOST_LAYERS = 10_000
LINEAR, TIED = "linear_attention", "tie_word_embeddings"

CAUSAL = ConfigFieldRule("is_causal", (True,), "attention must be causal")


class ConfigFields:
    """Fields of one config.json, each checked as it is read."""

    def __init__(
        self,
        file: Path,
        raw: dict[str, Any],
        family: Family,
        *,
        wrapped: bool = False,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """wrapped: `raw` is a part of the file, that of the language model. overrides: a role's `hf_overrides`."""
        self._file, self._family, self._wrapped = file, family, wrapped
        learned = bool(family.embedding.position_offset and overrides)
        self._refuse("hf_overrides", overrides, learned, "the model learned a vector for each position")
        full = FULL if family.rotation.by_layer else None
        self._overriding = overriding_fields(raw, overrides or {}, self._refuse, nested=full)
        self._raw = with_fields(raw, self._overriding)

    def read(self, head: str) -> dict[str, Any]:
        """The fields of `ModelSpec` but for the head. Errors: CheckpointError."""
        family, raw = self._family, self._raw
        for key in family.required:
            value = raw.get(key, family.missing.get(key))
            if not is_number(value):
                raise CheckpointError(f"{self._file}: {key} is missing or no number: {value!r}")
        self._check_rules()
        hidden, heads = self._size("hidden_size"), self._size("num_attention_heads")
        head_dim, kv_heads = hidden // heads, heads
        if family.attention.grouped:
            head_dim = self._size("head_dim", family.default("head_dim") or head_dim)
            kv_heads = self._size("num_key_value_heads", self._given("num_key_value_heads") or heads)
        positions = self._size(POSITIONS)
        num_layers, window = self._size("num_hidden_layers", most=MOST_LAYERS), self._window()
        attention = AttentionFields(raw, family, self._refuse, self._size, num_layers=num_layers, window=window).read(
            positions
        )
        part, norms_key = self._rotary_part(), family.attention.norms_key
        found = dict(
            path=self._file.parent,
            family=family.name,
            num_layers=num_layers,
            hidden_size=hidden,
            ffn_hidden_size=self._size(family.mlp.size_key),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=self._size("vocab_size"),
            norm_eps=family.norms.eps or self._given("rms_norm_eps"),
            tied=head == "lm" and self._tied(),
            max_positions=positions,
            projected_size=self._projected_size(hidden),
            post_norm=self._post_norm(),
            rotary_dim=None if part == 1 else int(head_dim * part),
            sliding_window=window,
            pad_token_id=self._pad_token_id(),
            overriding=self._overriding,
            qk_norm_given=bool(raw.get(norms_key)) if norms_key else None,
            **(self._experts(family.experts) if family.experts else {}),
            **self._prediction_layers(family.prediction.key),
            **attention | (self._delta_nets() if family.mixer == "delta_net" else {}),
        )
        self._refuse(
            "num_key_value_heads", kv_heads, heads % kv_heads > 0, f"must divide num_attention_heads = {heads}"
        )
        if family.mixer == "latent":
            check_rope(dict(attention["rope"]), self._refuse)
            found |= read_latent(raw, family, self._size, self._refuse)
            found["block_fp8"] = is_block_fp8(raw, family)
        self._refuse("num_attention_heads", heads, head_dim == 0, f"hidden_size is {hidden}")
        kind = raw.get("model_type")  # transformers and vLLM go by it
        must = family.model_type or family.name
        other = kind not in (must, *family.other_model_types)
        rule = f"must be {must!r} for this architecture; each word names other mathematics: correct the wrong one"
        self._refuse("model_type", kind, other, rule)
        return found

    def _size(self, key: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """A positive whole number; where the file leaves it out or has null, `default`, else the family's."""
        value = self._raw.get(key)
        if value is None:
            if default is not None:
                return default
            value = self._family.default(key)
        if not is_number(value) or value != int(value) or not 0 < value <= most:
            raise self._refusal(key, value, f"must be a whole number from 1 to {most}")
        return int(value)

    def _given(self, key: str) -> Any:
        """A field, or what a missing one means; a null stays null."""
        return self._raw.get(key, self._family.default(key))

    def _pad_token_id(self) -> int | None:
        value = self._given("pad_token_id")
        wrong = value is not None and (not is_number(value) or value != int(value))
        self._refuse("pad_token_id", value, wrong, "must be a token id or null")
        return None if value is None or value < 0 else int(value)  # older files have -1 for none

    def _check_rules(self) -> None:
        raw = self._raw
        quantised = bool(raw.get("quantization_config") or raw.get("compression_config"))
        unread = quantised and not is_block_fp8(raw, self._family)
        self._refuse("quantization_config", "...", unread, "quantised weights")
        for rule in (*self._family.rules, CAUSAL):
            value = raw.get(rule.key, "missing" if rule.required else rule.allowed[0])
            self._refuse(rule.key, value, value not in rule.allowed, rule.reason)
        eps = raw.get("rms_norm_eps", self._family.missing.get("rms_norm_eps", 0.0))
        self._refuse("rms_norm_eps", eps, not is_number(eps) or not 0 <= eps < 1, "must be a number from 0 to 1")

    def _tied(self) -> bool:
        """Whether the output layer is the embedding."""
        names = wrapped_names if self._wrapped else lambda name: [name]
        heads, embeddings = names(HEAD), names(self._family.embedding.name)
        return bool(self._given(TIED)) and not has_own_head(
            self._file.parent, heads, embeddings, self._size("vocab_size")
        )

    def _projected_size(self, hidden: int) -> int | None:
        key = self._family.embedding.size_key
        size = self._size(key, hidden) if key else hidden
        return None if size == hidden else size

    def _post_norm(self) -> bool:
        key = self._family.norms.before_key
        before = self._raw.get(key, True) if key else True
        self._refuse(key, before, not isinstance(before, bool), "must be true or false")
        return not before

    def _experts(self, traits: ExpertTraits) -> dict[str, Any]:
        keys = [key for key in traits.count_keys if self._raw.get(key) is not None]
        if not keys:
            named = " or ".join(traits.count_keys)
            raise CheckpointError(f"{self._file}: {named} is missing or no number: None")
        num_experts, chosen = self._size(keys[0], most=MOST_LAYERS), self._size("num_experts_per_tok")
        self._refuse("num_experts_per_tok", chosen, chosen > num_experts, f"there are {num_experts} experts")
        normalize = bool(self._given("norm_topk_prob")) if traits.normalizes is None else traits.normalizes
        router = RouterSizes(normalize, self._scaling() if traits.sigmoid else 1.0)
        if traits.in_groups:
            given = self._given("n_group"), self._given("topk_group")
            groups, chosen_groups = read_groups(*given, num_experts, chosen, self._refuse)
            router = router._replace(groups=groups, chosen_groups=chosen_groups)
        found = {"num_experts": num_experts, "experts_per_token": chosen, "router": router}
        return found | self._dense_layers(traits.dense_layers_key) | self._shared_experts(traits)

    def _dense_layers(self, key: str) -> dict[str, Any]:
        most = self._size("num_hidden_layers", most=MOST_LAYERS) - 1
        count = dense_layers(self._raw, self._family, key, self._refuse) if key else 0
        wrong = not is_number(count) or count != int(count) or not 0 <= count <= most
        self._refuse(key, count, wrong, f"must be a whole number from 0 to {most}: the other layers have experts")
        return (
            {"num_dense_layers": int(count), "dense_ffn_hidden_size": self._size("intermediate_size")} if count else {}
        )

    def _prediction_layers(self, key: str) -> dict[str, Any]:
        count = self._given(key) if key else 0
        return {"num_prediction_layers": self._size(key, count, most=MOST_LAYERS)} if count else {}

    def _shared_experts(self, traits: ExpertTraits) -> dict[str, Any]:
        if traits.shared_size_key:
            return {"shared_ffn_hidden_size": self._size(traits.shared_size_key)}
        key = traits.shared_count_key
        if not key or not self._given(key):
            return {}
        return {"shared_ffn_hidden_size": self._size(key, most=MOST_LAYERS) * self._size(self._family.mlp.size_key)}

    def _scaling(self) -> float:
        factor = self._given("routed_scaling_factor")
        self._refuse("routed_scaling_factor", factor, not is_number(factor) or factor <= 0, "must be a positive number")
        return float(factor)

    def _delta_nets(self) -> dict[str, Any]:
        """Which layers are gated delta nets, and the sizes of these."""
        raw, num_layers = self._raw, self._size("num_hidden_layers", most=MOST_LAYERS)
        interval = self._size("full_attention_interval")
        kinds = raw.get("layer_types")
        if kinds is None:
            kinds = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(num_layers)]
        check_layer_types(kinds, (FULL, LINEAR), num_layers, self._refuse)
        for kind in (FULL, LINEAR):
            self._refuse("layer_types", "...", kind not in kinds, f"some of the layers must be {kind}")
        sizes = DeltaSizes(
            key_heads=self._size("linear_num_key_heads"),
            value_heads=self._size("linear_num_value_heads"),
            key_dim=self._size("linear_key_head_dim"),
            value_dim=self._size("linear_value_head_dim"),
            kernel=self._size("linear_conv_kernel_dim"),
        )
        self._refuse("linear_conv_kernel_dim", sizes.kernel, sizes.kernel < 2, "must be at least 2")
        uneven = sizes.value_heads % sizes.key_heads > 0
        rule = f"must be a multiple of linear_num_key_heads = {sizes.key_heads}"
        self._refuse("linear_num_value_heads", sizes.value_heads, uneven, rule)
        mixers = tuple("delta_net" if kind == LINEAR else "attention" for kind in kinds)
        return {"mixers": mixers, "delta": sizes}

    def _window(self) -> int | None:
        """The sliding window that attention has, if any."""
        windows = self._family.windows
        if windows is None or (windows.switch and not self._raw.get("use_sliding_window")):
            return None
        return None if self._given("sliding_window") is None else self._size("sliding_window")

    def _rotary_part(self) -> float:
        """The share of a head's dimensions that turn."""
        key, default = "partial_rotary_factor", self._family.default("partial_rotary_factor")
        part: float = rope_object(self._raw, self._refuse).get(key, self._given(key))
        partial = is_number(part) and 0 < part <= 1 and (default < 1 or part == 1)
        self._refuse(key, part, not partial, f"must be 1 in the family {self._family.name}")
        return part

    def _refuse(self, key: str, value: object, refused: bool, rule: str) -> None:
        if refused:
            raise self._refusal(key, value, rule)

    def _refusal(self, key: str, value: object, rule: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {key} = {value!r} is not supported: {rule}")


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
