"""What a HuggingFace architecture means in megatron terms.

A `ModelSpec` is everything that building, loading, resharding and exporting a model need to know of config.json.
What sets an architecture apart stands in `hybridflow.architecture.families`.
"""

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hybridflow.architecture.adapter import check_no_adapter
from hybridflow.architecture.families import FAMILIES, Family
from hybridflow.architecture.lora import Lora
from hybridflow.architecture.rope import Rope, Rotary, is_number, num_angles, read_rope, rope_object, rotary
from hybridflow.architecture.tied_head import has_own_head
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.formats.json_text import parse_json

VOCAB_MULTIPLE = 64  # vLLM pads vocabularies to it; padding alike lets embedding and output alias
EXPERT_MULTIPLE = 8  # rows of 16 bytes in half precision
Head = Literal["lm", "score"]  # log-probs of every token; one value a token
Mixer = Literal["attention"]  # what lets the tokens of a sequence read each other
Mlp = Literal["dense", "experts"]  # what a layer has in place of an MLP: that, or a mixture of experts
HEADS: dict[str, Head] = {"ForCausalLM": "lm", "ForSequenceClassification": "score"}
ARCHITECTURES = {prefix + suffix: (prefix, head) for prefix in FAMILIES for suffix, head in HEADS.items()}
LARGEST = 1 << 31  # no size of a model is beyond this; a damaged config.json may be
MOST_LAYERS = 10_000


class LayerKind(NamedTuple):
    """What a layer is made of."""

    mixer: Mixer = "attention"
    mlp: Mlp = "dense"


DENSE, EXPERTS = LayerKind(), LayerKind(mlp="experts")


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of one of the known families."""

    path: Path
    family: str  # the name of a Family: "llama", "qwen2", ...
    head: Head
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int  # of an expert where there are any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool  # as config.json says it, unless the weights have an output layer that differs from the embedding
    max_positions: int
    projected_size: int | None = None  # of the embeddings, projected in and out; None: they have the hidden size
    post_norm: bool = False  # norms stand after the residual sums, and none after the last layer
    rotary_dim: int | None = None  # how many of a head's dimensions turn; None: all
    mixers: tuple[Mixer, ...] = ()  # of each layer; (): all attention
    num_experts: int = 0  # 0: one dense MLP
    num_dense_layers: int = 0  # of a model with experts: the first layers, which have none
    experts_per_token: int = 0
    dense_ffn_hidden_size: int = 0  # of the first layers of a model with experts
    shared_ffn_hidden_size: int = 0  # of the expert that every token goes through beside the chosen ones; 0: none
    normalize_router: bool = True  # the weights of a token's experts sum to 1
    routed_scaling: float = 1.0  # what those weights are multiplied with
    qk_norm_given: bool | None = None  # None: as the family
    num_prediction_layers: int = 0  # behind the others; their weights are neither read nor written
    sliding_window: int | None = None  # tokens that attention reaches back, itself included
    rope: Rope = field(default=(), compare=False)  # kind, theta and scaling, by name
    pad_token_id: int | None = None  # at which a score is never read; None: the config names none
    lora: Lora | None = None  # the adapters that a role gives the model; config.json knows of none

    @property
    def traits(self) -> Family:
        """What the whole family has in common."""
        return next(family for family in FAMILIES.values() if family.name == self.family)

    @property
    def qk_norm(self) -> bool:
        return self.traits.qk_norm if self.qk_norm_given is None else self.qk_norm_given

    def layer_kind(self, layer: int) -> LayerKind:
        mlp: Mlp = "experts" if self.num_experts and layer >= self.num_dense_layers else "dense"
        return LayerKind(self.mixers[layer] if self.mixers else "attention", mlp)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds that there are, in the order in which they come first."""
        return tuple(dict.fromkeys(map(self.layer_kind, range(self.num_layers))))

    def mlp_size(self, mlp: Mlp) -> int:
        """Size of what every token of a layer goes through: the MLP, or the shared expert; 0 where there is none."""
        if mlp == "experts":
            return self.shared_ffn_hidden_size
        return self.dense_ffn_hidden_size if self.num_experts else self.ffn_hidden_size

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def embedding_size(self) -> int:
        """Columns of the embedding, and of what reads the last hidden states."""
        return self.projected_size or self.hidden_size

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned positions."""
        return self.max_positions + self.traits.position_offset

    @property
    def base(self) -> "ModelSpec":
        """Without adapters: what the directory holds."""
        return replace(self, lora=None)

    def check_parallel(self, key: str, tp: int) -> None:
        """Raise ConfigError, naming `key`, unless `tp` ranks can share this model."""
        self._check_divides(key, tp, "num_attention_heads", self.num_heads)
        if not self.num_experts:
            self._check_divides(key, tp, self.traits.ffn_key, self.ffn_hidden_size)
        if self.num_dense_layers:
            self._check_divides(key, tp, "intermediate_size", self.dense_ffn_hidden_size)
        self._check_divides(key, tp, "the size of shared experts", self.shared_ffn_hidden_size)
        self._check_divides(key, tp, "padded vocab_size", self.padded_vocab_size)
        few, many = sorted((self.num_kv_heads, tp))
        if many % few:
            raise ConfigError(
                f"{key} = {tp} must divide num_key_value_heads = {self.num_kv_heads} of {self.path} or be a multiple "
                f"of that number: {many} = {many // few} x {few} + {many % few}"
            )
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim  # ranks may share a key/value group
        if rows % tp:
            raise ConfigError(
                f"{key} = {tp} does not divide the {rows} rows of queries, keys and values of {self.path}: "
                f"{rows} = {rows // tp} x {tp} + {rows % tp}"
            )

    def check_experts(self, key: str, ep: int) -> None:
        """Raise ConfigError, naming `key`, unless `ep` ranks can have as many whole experts each."""
        if ep > 1 and not self.num_experts:
            raise ConfigError(f"{key} = {ep}: {self.path} has no experts")
        self._check_divides(key, ep, "the number of experts", self.num_experts)

    def check_expert_shares(self, key: str, tp: int) -> None:
        """Raise ConfigError, naming `key`, unless `tp` ranks can share each expert."""
        if not self.num_experts:
            return
        self._check_divides(key, tp, self.traits.ffn_key, self.ffn_hidden_size)
        for what, count in ((self.traits.ffn_key, self.ffn_hidden_size // tp), ("hidden_size", self.hidden_size)):
            if count % EXPERT_MULTIPLE:
                raise ConfigError(
                    f"{key} = {tp} leaves each expert {count} of {what} of {self.path}, no multiple of "
                    f"{EXPERT_MULTIPLE}, as torch's grouped product needs it"
                )

    def _check_divides(self, key: str, parts: int, what: str, count: int) -> None:
        if count % parts:
            raise ConfigError(
                f"{key} = {parts} does not divide {what} = {count} of {self.path}: "
                f"{count} = {count // parts} x {parts} + {count % parts}"
            )

    def check_length(self, longest: int, key: str = "data.max_prompt_length + sampling.max_response_length") -> None:
        """Raise ConfigError where sequences exceed the positions that the model knows, or the reach of attention.

        key: what in the config makes them so long.
        """
        length = f"{key} = {longest}"
        if longest > self.max_positions:
            raise ConfigError(f"{length} exceeds max_position_embeddings = {self.max_positions} of {self.path}")
        angles = num_angles(self.rope)
        if angles is not None and longest > angles:
            raise ConfigError(
                f"{length} exceeds factor x original_max_position_embeddings = {angles} of rope_type yarn of "
                f"{self.path}: vLLM turns no position beyond"
            )
        if self.sliding_window is not None and longest > self.sliding_window:
            raise ConfigError(
                f"{length} exceeds sliding_window = {self.sliding_window} of {self.path}: hybridflow trains attention "
                "over the whole sequence, which is the same only up to the window's length"
            )

    def check_vocabulary(self, role: str, actor: "ModelSpec") -> None:
        """Raise ConfigError unless this model knows every token id of the actor's."""
        if self.vocab_size < actor.vocab_size:
            raise ConfigError(
                f"{role}.model = {self.path} has vocab_size {self.vocab_size}, fewer than the actor's "
                f"{actor.vocab_size}: all models of a run read the actor's token ids"
            )

    def rotary(self) -> Rotary | None:
        """What queries and keys are turned by; None where positions are learned."""
        if self.traits.position_offset:
            return None
        return rotary(self.path, self.head_dim, self.rotary_dim or self.head_dim)


def read_spec(path: str | Path, *, adapters: bool = False) -> ModelSpec:
    """The spec of a HuggingFace directory, or of a torch_dist checkpoint with config.json beside the weights.

    Of weights it looks at the output layer alone, where config.json says that it is the embedding. adapters: also
    where these lie there alone. Errors: CheckpointError naming the file and the field that is missing or unsupported.
    """
    if not adapters:
        check_no_adapter(Path(path))
    raw = _read_json(file := Path(path) / "config.json")
    architecture = _architecture(file, raw)
    prefix, head = ARCHITECTURES[architecture]
    return _Reader(file, raw, FAMILIES[prefix]).spec(head)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file; a model is a HuggingFace directory") from error
    except OSError as error:
        raise CheckpointError(f"{file}: is not JSON: {error}") from error
    return parse_json(text, f"{file}: is not JSON: ")


def _architecture(file: Path, raw: dict[str, Any]) -> str:
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "none"
    if architecture not in ARCHITECTURES:
        nearest = get_close_matches(architecture, ARCHITECTURES, n=1)
        hint = f"the nearest known one is {nearest[0]}; " if nearest else ""
        raise CheckpointError(
            f"{file}: architectures = {architecture!r} is not supported; {hint}known are {', '.join(ARCHITECTURES)}"
        )
    return architecture


def config_changes(spec: ModelSpec, head: Head | None) -> dict[str, Any]:
    """What config.json says otherwise: a model without a language model head is one that scores.

    A separate output layer is declared untied, also where the source's config.json said otherwise.
    """
    fewer = {spec.traits.prediction_layers_key: 0} if spec.num_prediction_layers else {}
    if head == spec.head:
        return fewer if spec.tied or head != "lm" else {**fewer, "tie_word_embeddings": False}
    prefix = next(prefix for prefix, family in FAMILIES.items() if family.name == spec.family)
    suffix = next(suffix for suffix, head in HEADS.items() if head == "score")
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [prefix + suffix], **labels, **fewer}


class _Reader:
    """Fields of one config.json, each checked as it is read."""

    def __init__(self, file: Path, raw: dict[str, Any], family: Family) -> None:
        self._file, self._raw, self._family = file, raw, family

    def spec(self, head: Head) -> ModelSpec:
        family, raw = self._family, self._raw
        missing = [key for key in family.required if not is_number(raw.get(key))]
        if missing:
            raise CheckpointError(f"{self._file}: {missing[0]} is missing or no number: {raw.get(missing[0])!r}")
        self._check_rules()
        hidden, heads = self._size("hidden_size"), self._size("num_attention_heads")
        head_dim, kv_heads = hidden // heads, heads
        if family.grouped:
            head_dim, kv_heads = (
                self._size("head_dim", family.head_dim or head_dim),
                self._size("num_key_value_heads", self._missing("num_key_value_heads", family.kv_heads) or heads),
            )
        positions = self._size("max_position_embeddings", family.max_positions)
        theta = family.rope_theta
        rope = () if family.position_offset else read_rope(raw, self._refuse, theta=theta, positions=positions)
        part = self._rotary_part()
        spec = ModelSpec(
            path=self._file.parent,
            family=family.name,
            head=head,
            num_layers=self._size("num_hidden_layers", most=MOST_LAYERS),
            hidden_size=hidden,
            ffn_hidden_size=self._size(family.ffn_key),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=self._size("vocab_size"),
            norm_eps=family.norm_eps or raw["rms_norm_eps"],
            tied=head == "lm" and self._tied(),
            max_positions=positions,
            projected_size=self._projected_size(hidden),
            post_norm=self._post_norm(),
            rotary_dim=None if part == 1 else int(head_dim * part),
            sliding_window=self._window(),
            rope=rope,
            pad_token_id=self._pad_token_id(),
            qk_norm_given=bool(raw.get(family.qk_norm_key)) if family.qk_norm_key else None,
            **(self._experts() if family.expert_keys else {}),
        )
        self._refuse("num_key_value_heads", kv_heads, heads % kv_heads > 0, f"must divide {heads} heads")
        self._refuse("num_attention_heads", heads, head_dim == 0, f"hidden_size is {hidden}")
        kind = raw.get("model_type")  # transformers and vLLM go by it
        self._refuse("model_type", kind, kind != family.name, f"must be {family.name!r} for this architecture")
        return spec

    def _size(self, key: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """A positive whole number; `default` where the file leaves it out."""
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if not is_number(value) or value != int(value) or not 0 < value <= most:
            raise self._refusal(key, value, f"must be a whole number from 1 to {most}")
        return int(value)

    def _missing(self, key: str, default: int | None) -> int | None:
        """The default of a field that is not there; a null is none."""
        return None if key in self._raw else default

    def _pad_token_id(self) -> int | None:
        value = self._raw.get("pad_token_id", self._family.pad_token_id)
        wrong = value is not None and (not is_number(value) or value != int(value))
        self._refuse("pad_token_id", value, wrong, "must be a token id or null")
        return None if value is None or value < 0 else int(value)  # older files have -1 for none

    def _check_rules(self) -> None:
        raw = self._raw
        quantised = bool(raw.get("quantization_config") or raw.get("compression_config"))
        self._refuse("quantization_config", "...", quantised, "quantised weights")
        for rule in self._family.rules:
            value = raw.get(rule.key, "missing" if rule.required else rule.allowed[0])
            self._refuse(rule.key, value, value not in rule.allowed, rule.reason)
        eps = raw.get("rms_norm_eps", 0.0)
        self._refuse("rms_norm_eps", eps, not is_number(eps) or not 0 <= eps < 1, "must be a number from 0 to 1")

    def _tied(self) -> bool:
        """Whether the output layer is the embedding."""
        said = bool(self._raw.get("tie_word_embeddings", self._family.tied))
        return said and not has_own_head(self._file.parent, self._family.embedding, self._size("vocab_size"))

    def _projected_size(self, hidden: int) -> int | None:
        key = self._family.embedding_size_key
        size = self._size(key, hidden) if key else hidden
        return None if size == hidden else size

    def _post_norm(self) -> bool:
        key = self._family.pre_norm_key
        before = self._raw.get(key, True) if key else True
        self._refuse(key, before, not isinstance(before, bool), "must be true or false")
        return not before

    def _experts(self) -> dict[str, Any]:
        keys = [key for key in self._family.expert_keys if self._raw.get(key) is not None]
        if not keys:
            named = " or ".join(self._family.expert_keys)
            raise CheckpointError(f"{self._file}: {named} is missing or no number: None")
        num_experts, chosen = self._size(keys[0], most=MOST_LAYERS), self._size("num_experts_per_tok")
        self._refuse("num_experts_per_tok", chosen, chosen > num_experts, f"there are {num_experts} experts")
        normalize = self._family.normalize_router
        if normalize is None:
            normalize = bool(self._raw.get("norm_topk_prob", self._family.normalize_missing))
        found = {"num_experts": num_experts, "experts_per_token": chosen, "normalize_router": normalize}
        return found | self._dense_layers() | self._shared_experts() | self._scaling() | self._prediction_layers()

    def _dense_layers(self) -> dict[str, Any]:
        key, most = self._family.dense_layers_key, self._size("num_hidden_layers", most=MOST_LAYERS) - 1
        count = self._raw.get(key, 1) if key else 0
        wrong = not is_number(count) or count != int(count) or not 0 <= count <= most
        self._refuse(key, count, wrong, f"must be a whole number from 0 to {most}: the other layers have experts")
        return (
            {"num_dense_layers": int(count), "dense_ffn_hidden_size": self._size("intermediate_size")} if count else {}
        )

    def _prediction_layers(self) -> dict[str, Any]:
        key = self._family.prediction_layers_key
        count = self._raw.get(key, 1) if key else 0
        return {"num_prediction_layers": self._size(key, count, most=MOST_LAYERS)} if count else {}

    def _shared_experts(self) -> dict[str, Any]:
        key = self._family.shared_experts_key
        count = self._raw.get(key, 1) if key else 0
        if not count:
            return {}
        return {"shared_ffn_hidden_size": self._size(key, count, most=MOST_LAYERS) * self._size(self._family.ffn_key)}

    def _scaling(self) -> dict[str, Any]:
        if not self._family.sigmoid_router:
            return {}
        factor = self._raw.get("routed_scaling_factor", 1.0)
        self._refuse("routed_scaling_factor", factor, not is_number(factor) or factor <= 0, "must be a positive number")
        return {"routed_scaling": float(factor)}

    def _window(self) -> int | None:
        """The sliding window that attention has, if any."""
        raw, family = self._raw, self._family
        if not family.has_window or (family.window_switch and not raw.get("use_sliding_window")):
            return None
        if raw.get("sliding_window", family.window) is None:
            return None
        return self._size("sliding_window", family.window)

    def _rotary_part(self) -> float:
        """The share of a head's dimensions that turn."""
        default = self._family.rotary_part
        part: float = rope_object(self._raw, self._refuse).get(
            "partial_rotary_factor", self._raw.get("partial_rotary_factor", default)
        )
        partial = is_number(part) and 0 < part <= 1 and (default < 1 or part == 1)
        self._refuse("partial_rotary_factor", part, not partial, f"must be 1 in the family {self._family.name}")
        return part

    def _refuse(self, key: str, value: object, refused: bool, rule: str) -> None:
        if refused:
            raise self._refusal(key, value, rule)

    def _refusal(self, key: str, value: object, rule: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {key} = {value!r} is not supported: {rule}")
