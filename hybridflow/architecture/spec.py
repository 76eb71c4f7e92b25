"""What a HuggingFace architecture means in megatron terms.

A `ModelSpec` is everything that building, loading, resharding and exporting a model need to know of config.json.
What sets an architecture apart stands in `hybridflow.architecture.families`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hybridflow.architecture.adapter import check_no_adapter
from hybridflow.architecture.config_fields import FULL, SLIDING, TIED, ConfigFields
from hybridflow.architecture.families import BY_NAME, FAMILIES, REFUSED
from hybridflow.architecture.family import LANGUAGE_MODEL, POSITIONS, SCORES, WRAPPER, Family
from hybridflow.architecture.latent_fields import told_to_engines
from hybridflow.architecture.layer_kinds import (
    PLAIN_ROUTER,
    DeltaSizes,
    LatentSizes,
    LayerKind,
    MixerName,
    MlpName,
    RouterSizes,
)
from hybridflow.architecture.lora import Lora
from hybridflow.architecture.rope import QueryGrowth, Rope, Rotary, attention_scale, num_angles, rotary, text_config
from hybridflow.errors import CheckpointError, ConfigError, remedy
from hybridflow.formats.gguf_files import gguf_hint
from hybridflow.formats.json_text import parse_json

VOCAB_MULTIPLE = 64  # vLLM pads vocabularies to it; padding alike lets embedding and output alias
Head = Literal["lm", "score"]  # log-probs of every token; one value a token
HEADS: dict[str, Head] = {LANGUAGE_MODEL: "lm", SCORES: "score"}
TEXT_CONFIG = "text_config"  # the language model's part of a wrapper's config.json


def architectures(families: Mapping[str, Family]) -> dict[str, tuple[str, Head]]:
    """HuggingFace's names: prefix of the family, and the head."""
    found: dict[str, tuple[str, Head]] = {
        prefix + suffix: (prefix, head)
        for prefix, family in families.items()
        for suffix, head in HEADS.items()
        if head == "lm" or not family.score_architecture
    }
    found |= {
        each.score_architecture: (prefix, "score") for prefix, each in families.items() if each.score_architecture
    }
    return found | {family.wrapper: (prefix, "lm") for prefix, family in families.items() if family.wrapper}


ARCHITECTURES = architectures(FAMILIES)


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
    wrapped: bool = False  # what reads images lies beside the language model, and is left out
    mixers: tuple[MixerName, ...] = ()  # of each layer; (): all attention
    delta: DeltaSizes | None = None  # of the layers that are gated delta nets
    latent: LatentSizes | None = None  # of a model whose layers are all of latent attention
    num_experts: int = 0  # 0: one dense MLP
    num_dense_layers: int = 0  # of a model with experts: the first layers, which have none
    experts_per_token: int = 0
    dense_ffn_hidden_size: int = 0  # of the first layers of a model with experts
    shared_ffn_hidden_size: int = 0  # of the expert that every token goes through beside the chosen ones; 0: none
    router: RouterSizes = PLAIN_ROUTER
    block_fp8: bool = False  # the files have fp8 with a scale a block, which is read as bfloat16
    qk_norm_given: bool | None = None  # None: as the family
    num_prediction_layers: int = 0  # behind the others; their weights are neither read nor written
    sliding_window: int | None = None  # tokens that attention reaches back, itself included
    given_scale: float | None = None  # what scores are multiplied with; None: head_dim ** -0.5
    rope: Rope = field(default=(), compare=False)  # kind, theta and scaling, by name
    query_growth: QueryGrowth | None = None
    window_rope: Rope = field(default=(), compare=False)  # of layers with windows, where another
    pad_token_id: int | None = None  # at which a score is never read; None: the config names none
    overriding: dict[str, Any] = field(default_factory=dict, compare=False)  # what stands in place of config.json's
    overrides: dict[str, Any] = field(default_factory=dict, compare=False)  # a role's `hf_overrides`
    lora: Lora | None = None  # the adapters that a role gives the model; config.json knows of none

    @property
    def traits(self) -> Family:
        """What the whole family has in common."""
        return BY_NAME[self.family]

    @property
    def qk_norm(self) -> bool:
        """Over each head."""
        return self.traits.attention.norms == "heads" if self.qk_norm_given is None else self.qk_norm_given

    def layer_kind(self, layer: int) -> LayerKind:
        mlp: MlpName = "experts" if self.num_experts and layer >= self.num_dense_layers else "dense"
        return LayerKind(self.mixers[layer] if self.mixers else "attention", mlp)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds that there are, in the order in which they come first."""
        return tuple(dict.fromkeys(map(self.layer_kind, range(self.num_layers))))

    def mlp_size(self, mlp: MlpName) -> int:
        """Size of what every token of a layer goes through: the MLP, or the shared expert; 0 where there is none."""
        if mlp == "experts":
            return self.shared_ffn_hidden_size
        return self.dense_ffn_hidden_size if self.num_experts else self.ffn_hidden_size

    @property
    def num_query_blocks(self) -> int:
        """Heads of queries, and of their gates where there are any: blocks of `head_dim` rows in front of the keys."""
        return self.num_heads * (2 if self.traits.attention.gate else 1)

    @property
    def has_norms_in_front(self) -> bool:
        """Of attention and MLP."""
        return not self.post_norm and self.traits.norms.place != "behind"

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
        return self.max_positions + self.traits.embedding.position_offset

    @property
    def language_model(self) -> str:
        """HuggingFace's name of the architecture with the language model's head."""
        prefix = next(prefix for prefix, family in FAMILIES.items() if family.name == self.family)
        return prefix + LANGUAGE_MODEL

    @property
    def config_section(self) -> str | None:
        """The part of config.json that describes the language model; None: all of it."""
        return TEXT_CONFIG if self.wrapped else None

    @property
    def base(self) -> "ModelSpec":
        """Without adapters: what the directory holds."""
        return replace(self, lora=None)

    @property
    def reach(self) -> int | None:
        """The most tokens of a sequence, where a window is not computed as one; None: any number."""
        return None if "window" in self.mixers else self.sliding_window

    def check_length(
        self,
        longest: int,
        key: str = "data.max_prompt_length + sampling.max_response_length",
        role: str = "actor",
        shortened: Callable[[int], Mapping[str, Iterable[object]]] = lambda most: {},
    ) -> None:
        """Raise ConfigError where sequences exceed the positions that the model knows, or the reach of attention.

        key: what in the config makes them so long. role: whose model it is, by its config key. shortened: settings,
        as of `remedy`, with which sequences have so many tokens at most.
        """
        length, overrides = f"{key} = {longest}", f"{role}.hf_overrides"
        if longest > self.max_positions:
            learned = bool(self.traits.embedding.position_offset)
            more = {} if learned else {f"{overrides}.{POSITIONS}": [longest]}
            raise ConfigError(
                f"{length} exceeds {POSITIONS} = {self.max_positions} of {self.path}"
                f"{remedy({**shortened(self.max_positions), **more})}"
                + ("" if learned else ", with rope_parameters there as the model's card says")
            )
        angles = num_angles(self.rope)
        if angles is not None and longest > angles:
            raise ConfigError(
                f"{length} exceeds factor x original_max_position_embeddings = {angles} of rope_type yarn of "
                f"{self.path}: vLLM turns no position beyond. Shorten the rows, or give {overrides}.rope_parameters a "
                f"factor of {-int(-longest * dict(self.rope)['factor'] // angles)}{remedy(shortened(angles))}"
            )
        if self.reach is not None and longest > self.reach:
            raise ConfigError(
                f"{length} exceeds sliding_window = {self.reach} of {self.path}: hybridflow trains attention "
                "over the whole sequence, which is the same only up to the window's length"
                f"{remedy(shortened(self.reach))}"
            )

    def check_vocabulary(self, role: str, actor: "ModelSpec") -> None:
        """Raise ConfigError unless this model knows every token id of the actor's."""
        if self.vocab_size < actor.vocab_size:
            reward = role.startswith("reward.models.")
            settings = {f"{role}.reencode": [True]} if reward else {f"{role}.model": [actor.path]}
            raise ConfigError(
                f"{role}.model = {self.path} has vocab_size {self.vocab_size}, fewer than the actor's "
                f"{actor.vocab_size}: all models of a run read the actor's token ids{remedy(settings)}"
            )

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        own = attention_scale(self.rope, self.head_dim) if self.latent is not None else self.head_dim**-0.5
        return self.given_scale or own

    @property
    def engine_fields(self) -> dict[str, Any]:
        """What of config.json an engine reads otherwise: what transformers 5 leaves out, what we have changed."""
        found = told_to_engines(self.traits, self.num_dense_layers)
        if self.traits.experts is not None and self.traits.experts.router_in_dtype:
            found["moe_router_dtype"] = "float32"  # as transformers and the trainer compute the router's logits
        found |= self.query_growth.engines_fields if self.query_growth else {}
        if self.overriding:
            rope = text_config(self.path, self.overriding).rope_parameters
            found |= {POSITIONS: self.max_positions, "rope_parameters": rope}
        return found | ({"quantization_config": None} if self.block_fp8 else {})

    def rotary(self) -> Rotary | None:
        """What queries and keys are turned by; None where positions are learned."""
        if self.traits.embedding.position_offset:
            return None
        layers = FULL if self.traits.rotation.by_layer else None
        config = text_config(self.path, self.overriding)
        return rotary(config, self.head_dim, self.rotary_dim or self.head_dim, layers=layers)

    def window_rotary(self) -> Rotary | None:
        """The same of layers with windows; None: as in other layers."""
        if not self.window_rope:
            return None
        return rotary(text_config(self.path, self.overriding), self.head_dim, self.head_dim, layers=SLIDING)


def read_spec(path: str | Path, *, adapters: bool = False, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec of a HuggingFace directory, or of a torch_dist checkpoint with config.json beside the weights.

    Of weights it looks at the output layer alone, where config.json says that it is the embedding. adapters: also
    where these lie there alone. overrides: a role's `hf_overrides`. Errors: CheckpointError naming the file and the
    field that is missing or unsupported.
    """
    if not adapters:
        check_no_adapter(Path(path))
    raw = _read_json(file := Path(path) / "config.json")
    architecture = _architecture(file, raw)
    prefix, head = ARCHITECTURES[architecture]
    wrapped = architecture.endswith(WRAPPER)
    if wrapped:
        family, raw = _text_config(file, raw, architecture)
    else:
        family = FAMILIES[prefix]
    fields = ConfigFields(file, raw, family, wrapped=wrapped, overrides=overrides)
    return ModelSpec(head=head, wrapped=wrapped, overrides=dict(overrides or {}), **fields.read(head))


def _text_config(file: Path, raw: dict[str, Any], architecture: str) -> tuple[Family, dict[str, Any]]:
    """The family of a wrapper's language model, and its part of the file with what the wrapper says for both.

    transformers ties by the wrapper's word alone.
    """
    text = raw.get(TEXT_CONFIG)
    if not isinstance(text, dict):
        raise CheckpointError(f"{file}: {TEXT_CONFIG} = {text!r} is not supported: must be an object")
    inside = [family for family in FAMILIES.values() if family.wrapper == architecture]
    first, kind = inside[0], text.get("model_type")
    family = next((each for each in inside if (each.model_type or each.name) == kind), first)
    text = {"model_type": first.model_type or first.name} | text | {TIED: family.wrapper_tied}
    shared = (TIED, "is_causal", "quantization_config", "compression_config")
    return family, text | {key: raw[key] for key in shared if key in raw}


OF_A_RUN = ("hf", "actor", "checkpoints/step_*/actor", "step_*/actor")  # where a model is, the trained one first


def _read_json(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes()
    except FileNotFoundError as error:
        run = [near.parent for place in OF_A_RUN for near in sorted(file.parent.glob(f"{place}/config.json"))[-1:]]
        hint = f", and this is a run's: {run[0]} is one" if run else ""
        hint += gguf_hint(file.parent)
        raise CheckpointError(f"{file}: no such file; a model is a HuggingFace directory{hint}") from error
    except NotADirectoryError as error:
        raise CheckpointError(f"{file.parent}: is no directory{gguf_hint(file.parent)}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: is not JSON: {error}") from error
    return parse_json(text, f"{file}: is not JSON: ")


def _architecture(file: Path, raw: dict[str, Any]) -> str:
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "none"
    if architecture in REFUSED:
        raise CheckpointError(f"{file}: architectures = {architecture!r} is not supported: {REFUSED[architecture]}")
    if architecture not in ARCHITECTURES:
        meant = _misspelt(architecture)
        hint = f"misspelt? the nearest known one is {meant}; " if meant else ""
        if meant is None and get_close_matches(architecture, ARCHITECTURES, n=1):
            hint = "it computes otherwise than those of like names, and does not become one by the name; "
        raise CheckpointError(
            f"{file}: architectures = {architecture!r} is not supported; {hint}known are {', '.join(ARCHITECTURES)}"
        )
    return architecture


def _misspelt(architecture: str) -> str | None:
    """The known architecture with the same letters in another order, or one more; None for what may be another name."""
    from transformers.models.auto import modeling_auto as known

    theirs = {*known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    if architecture in theirs | {*known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}:
        return None
    given, digits = architecture.casefold(), re.findall(r"\d", architecture)
    folded = {each.casefold(): each for each in ARCHITECTURES if re.findall(r"\d", each) == digits}
    nearest = [each for each in get_close_matches(given, folded, cutoff=0.93) if not Counter(given) - Counter(each)]
    return folded[nearest[0]] if nearest else None


def config_changes(spec: ModelSpec, head: Head | None) -> dict[str, Any]:
    """What config.json says otherwise: a model without a language model head is one that scores.

    A separate output layer is declared untied, also where the source's config.json said otherwise.
    """
    fewer: dict[str, Any] = {spec.traits.prediction.key: 0} if spec.num_prediction_layers else {}
    fewer |= told_to_engines(spec.traits, spec.num_dense_layers)
    fewer |= {"quantization_config": None} if spec.block_fp8 else {}
    prefix = next(prefix for prefix, family in FAMILIES.items() if family.name == spec.family)
    fewer |= (spec.query_growth.engines_fields if spec.query_growth else {}) | spec.overriding
    fewer |= {"model_type": spec.traits.model_type or spec.family} if spec.wrapped else {}
    if head == spec.head:
        if spec.wrapped:
            fewer |= {"architectures": [spec.language_model], TIED: spec.tied}
        return fewer if spec.tied or head != "lm" else {**fewer, TIED: False}
    architecture = spec.traits.score_architecture or prefix + SCORES
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [architecture], **labels, **fewer}
