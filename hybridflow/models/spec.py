"""What a HuggingFace architecture means in megatron terms.

A `ModelSpec` is everything that building, loading, resharding and exporting a model need to know of its config.json.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import CheckpointError, ConfigError

VOCAB_MULTIPLE = 64  # vLLM pads vocabularies to it; padding alike lets embedding and output alias
REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
)
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama or Qwen2 family."""

    path: Path
    family: str  # "llama" or "qwen2"
    head: str  # "lm" or "score"
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    qkv_bias: bool
    tied: bool
    max_positions: int

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def num_parameters(self) -> int:
        """Of the language model with its true vocabulary."""
        kv, q = self.num_kv_heads * self.head_dim, self.num_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv) + (q + 2 * kv if self.qkv_bias else 0)
        layer = attention + 3 * self.hidden_size * self.ffn_hidden_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied or self.head == "score" else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def check_parallel(self, key: str, tp: int) -> None:
        """Raise ConfigError, naming `key`, unless `tp` ranks can share this model."""
        for what, count in (
            ("num_attention_heads", self.num_heads),
            ("intermediate_size", self.ffn_hidden_size),
            ("padded vocab_size", self.padded_vocab_size),
        ):
            if count % tp:
                raise ConfigError(
                    f"{key} = {tp} does not divide {what} = {count} of {self.path}: "
                    f"{count} = {count // tp} x {tp} + {count % tp}"
                )
        few, many = sorted((self.num_kv_heads, tp))
        if many % few:
            raise ConfigError(
                f"{key} = {tp} neither divides num_key_value_heads = {self.num_kv_heads} of {self.path} nor is a "
                f"multiple of it: {many} = {many // few} x {few} + {many % few}"
            )
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim  # ranks may share a key/value group
        if rows % tp:
            raise ConfigError(
                f"{key} = {tp} does not divide the {rows} rows of queries, keys and values of {self.path}: "
                f"{rows} = {rows // tp} x {tp} + {rows % tp}"
            )

    def check_length(self, longest: int) -> None:
        """Raise ConfigError where sequences exceed the positions the model knows."""
        if longest > self.max_positions:
            raise ConfigError(
                f"data.max_prompt_length + sampling.max_response_length = {longest} exceeds "
                f"max_position_embeddings = {self.max_positions} of {self.path}"
            )

    def check_vocabulary(self, role: str, actor: "ModelSpec") -> None:
        """Raise ConfigError unless this model knows every token id of the actor's."""
        if self.vocab_size < actor.vocab_size:
            raise ConfigError(
                f"{role}.model = {self.path} has vocab_size {self.vocab_size}, fewer than the actor's "
                f"{actor.vocab_size}: all models of a run read the actor's token ids"
            )

    def inverse_frequencies(self) -> Tensor:
        """Rotary inverse frequencies, (head_dim / 2,) float32, as transformers computes them for this config."""
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = AutoConfig.from_pretrained(self.path, local_files_only=True)
        rope = config.rope_parameters
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
            return 1.0 / rope["rope_theta"] ** exponents
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")[0]


ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", "lm"),
    "LlamaForSequenceClassification": ("llama", "score"),
    "Qwen2ForCausalLM": ("qwen2", "lm"),
    "Qwen2ForSequenceClassification": ("qwen2", "score"),
}


def read_spec(path: str | Path) -> ModelSpec:
    """The spec of a HuggingFace directory.

    Errors: CheckpointError naming the file and the field where config.json is missing, damaged or unsupported.
    """
    file = Path(path) / "config.json"
    raw = _read_json(file)
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file}: architectures = {architecture!r} is not supported; known are {', '.join(ARCHITECTURES)}"
        )
    missing = [key for key in REQUIRED if not isinstance(raw.get(key), int | float)]
    if missing:
        raise CheckpointError(f"{file}: {missing[0]} is missing or no number: {raw.get(missing[0])!r}")
    return _spec_from(file, raw, *ARCHITECTURES[architecture])


def _read_json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file; a model is a HuggingFace directory") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{file}: holds {type(tree).__name__}, not an object")
    return tree


def _spec_from(file: Path, raw: dict[str, Any], family: str, head: str) -> ModelSpec:
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))  # older files say "type"
    _refuse(file, "rope_type", rope_type, rope_type not in ROPE_TYPES, f"known are {', '.join(ROPE_TYPES)}")
    _refuse(file, "hidden_act", raw.get("hidden_act"), raw.get("hidden_act", "silu") != "silu", "must be silu")
    if family == "llama":
        for key in ("attention_bias", "mlp_bias"):
            _refuse(file, key, raw.get(key), bool(raw.get(key)), "biases of Llama are not supported")
    _refuse(file, "quantization_config", "...", bool(raw.get("quantization_config")), "quantised weights")
    window = bool(raw.get("use_sliding_window"))
    _refuse(file, "use_sliding_window", raw.get("use_sliding_window"), window, "must be false")
    return ModelSpec(
        path=file.parent,
        family=family,
        head=head,
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        ffn_hidden_size=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        norm_eps=raw["rms_norm_eps"],
        qkv_bias=family == "qwen2",
        tied=head == "lm" and bool(raw.get("tie_word_embeddings", False)),
        max_positions=raw.get("max_position_embeddings", 1 << 31),
    )


def _refuse(file: Path, key: str, value: Any, refused: bool, rule: str) -> None:
    if refused:
        raise CheckpointError(f"{file}: {key} = {value!r} is not supported: {rule}")
