"""The one table of weights: HuggingFace name <-> megatron name <-> engine name, split over ranks, and slice.

Loading, resharding and export read this table and nothing else. A parameter of megatron is made of one or more parts,
the HuggingFace tensors; each split says which slice of every part a tensor-parallel rank holds and how they are
joined.

    split        parts                 a rank's shard
    REPLICATED   1                     the part
    VOCAB        1 (vocab, hidden)     its rows of the part, zero rows past the vocabulary
    COLUMNS      1 (out, in)           its columns
    GATED        gate, up              [its rows of gate; its rows of up]
    QKV          q, k, v               for each of its key/value groups [q of the group; k; v]; where ranks outnumber
                                       the groups, an equal share of the rows of its group

vLLM joins alike, except QKV: [all q; all k; all v] of the rank, keys and values copied where ranks outnumber them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from hybridflow.models.spec import ModelSpec

Shape = tuple[int, ...]


class Split(Enum):
    REPLICATED = auto()
    VOCAB = auto()
    COLUMNS = auto()
    GATED = auto()
    QKV = auto()


@dataclass(frozen=True)
class Weight:
    """One parameter of a model. Names hold `{layer}` where there is one a layer, counted over the whole model."""

    megatron: str
    hf: tuple[str, ...]
    engine: str
    split: Split
    shapes: Callable[[ModelSpec], tuple[Shape, ...]]  # of the HuggingFace parts

    def for_layer(self, layer: int) -> "Weight":
        return Weight(
            self.megatron.format(layer=layer),
            tuple(name.format(layer=layer) for name in self.hf),
            self.engine.format(layer=layer),
            self.split,
            self.shapes,
        )


def _norm(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size,),)


def _vocab(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.vocab_size, spec.hidden_size),)


def _qkv(spec: ModelSpec) -> tuple[Shape, ...]:
    kv = (spec.num_kv_heads * spec.head_dim, spec.hidden_size)
    return ((spec.num_heads * spec.head_dim, spec.hidden_size), kv, kv)


def _qkv_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return tuple(shape[:1] for shape in _qkv(spec))


def _attention_out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.num_heads * spec.head_dim),)


def _gate_up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.ffn_hidden_size, spec.hidden_size),) * 2


def _down(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.ffn_hidden_size),)


def _score(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((1, spec.hidden_size),)


EMBEDDING = Weight(
    "embedding.word_embeddings.weight",
    ("model.embed_tokens.weight",),
    "model.embed_tokens.weight",
    Split.VOCAB,
    _vocab,
)
FINAL_NORM = Weight(
    "decoder.final_layernorm.weight", ("model.norm.weight",), "model.norm.weight", Split.REPLICATED, _norm
)
LM_HEAD = Weight("output_layer.weight", ("lm_head.weight",), "lm_head.weight", Split.VOCAB, _vocab)
VALUE_HEAD = Weight("output_layer.weight", ("score.weight",), "score.weight", Split.REPLICATED, _score)


def _layer(megatron: str, hf: tuple[str, ...], engine: str, split: Split, shapes: Callable) -> Weight:
    prefix = "model.layers.{layer}."
    return Weight(
        "decoder.layers.{layer}." + megatron, tuple(prefix + name for name in hf), prefix + engine, split, shapes
    )


QKV_WEIGHT = _layer(
    "self_attention.linear_qkv.weight",
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attn.qkv_proj.weight",
    Split.QKV,
    _qkv,
)
QKV_BIAS = _layer(
    "self_attention.linear_qkv.bias",
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "self_attn.qkv_proj.bias",
    Split.QKV,
    _qkv_bias,
)
LAYER = (
    _layer("input_layernorm.weight", ("input_layernorm.weight",), "input_layernorm.weight", Split.REPLICATED, _norm),
    QKV_WEIGHT,
    _layer(
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight",),
        "self_attn.o_proj.weight",
        Split.COLUMNS,
        _attention_out,
    ),
    _layer(
        "pre_mlp_layernorm.weight",
        ("post_attention_layernorm.weight",),
        "post_attention_layernorm.weight",
        Split.REPLICATED,
        _norm,
    ),
    _layer(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp.gate_up_proj.weight",
        Split.GATED,
        _gate_up,
    ),
    _layer("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "mlp.down_proj.weight", Split.COLUMNS, _down),
)

# Transformer Engine fuses the norms into the linear layers that follow them.
FUSED_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def layer_weights(spec: ModelSpec) -> tuple[Weight, ...]:
    return LAYER + ((QKV_BIAS,) if spec.qkv_bias else ())


def model_weights(spec: ModelSpec, head: str) -> Iterator[Weight]:
    """Every parameter of a model with this head ("lm" or "score"), in the order of the layers."""
    return (weight for weight, _ in staged_weights(spec, head, [range(spec.num_layers)]))


def staged_weights(spec: ModelSpec, head: str, stages: Sequence[Sequence[int]]) -> Iterator[tuple[Weight, int]]:
    """`model_weights` with the first pipeline stage that holds each; stages: the layers of every stage."""
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    yield EMBEDDING, 0
    for layer in range(spec.num_layers):
        for weight in layer_weights(spec):
            yield weight.for_layer(layer), stage_of[layer]
    yield FINAL_NORM, len(stages) - 1
    if head == "score":
        yield VALUE_HEAD, len(stages) - 1
    elif not spec.tied:
        yield LM_HEAD, len(stages) - 1


def canonical_name(name: str) -> str:
    """The table's name of a megatron parameter: wrappers and Transformer Engine's fusions undone."""
    name = name.replace("module.", "")
    for fused, plain in FUSED_NAMES.items():
        name = name.replace(fused, plain)
    return name


def local_slice(weight: Weight, part: int, spec: ModelSpec, tp_rank: int, tp: int) -> tuple[int, int, int]:
    """(dim, start, stop): what of a HuggingFace part rank `tp_rank` of `tp` reads.

    It is what the rank holds, except where fewer key/value groups than ranks make several ranks share a group: each of
    them reads the whole group, and `join_parts` takes its share.
    """
    shape = weight.shapes(spec)[part]
    if weight.split is Split.REPLICATED:
        return 0, 0, shape[0]
    if weight.split is Split.VOCAB:
        rows = spec.padded_vocab_size // tp
        return 0, min(tp_rank * rows, shape[0]), min((tp_rank + 1) * rows, shape[0])
    if weight.split is Split.QKV and tp > spec.num_kv_heads:
        group, rows = tp_rank * spec.num_kv_heads // tp, shape[0] // spec.num_kv_heads
        return 0, group * rows, (group + 1) * rows
    dim = 1 if weight.split is Split.COLUMNS else 0
    size = shape[dim] // tp
    return dim, tp_rank * size, (tp_rank + 1) * size


def join_parts(weight: Weight, parts: list[Tensor], spec: ModelSpec, tp_rank: int, tp: int) -> Tensor:
    """A rank's megatron shard from its slices of the HuggingFace parts."""
    if weight.split is Split.QKV:
        groups, sharing = max(spec.num_kv_heads // tp, 1), max(tp // spec.num_kv_heads, 1)
        joined = torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
        return joined.chunk(sharing)[tp_rank % sharing]
    if weight.split is Split.VOCAB:
        missing = spec.padded_vocab_size // tp - parts[0].shape[0]
        return torch.cat([parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:])]) if missing else parts[0]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def whole_parts(weight: Weight, shards: list[Tensor], spec: ModelSpec) -> list[Tensor]:
    """The HuggingFace parts from the megatron shards of all tensor-parallel ranks, in rank order."""
    if weight.split is Split.REPLICATED:
        return shards[:1]
    if weight.split is Split.COLUMNS:
        return [torch.cat(shards, dim=1)]
    if weight.split is Split.VOCAB:
        return [torch.cat(shards)[: spec.vocab_size]]
    if weight.split is Split.GATED:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    dim, queries = spec.head_dim, spec.num_heads // spec.num_kv_heads * spec.head_dim
    groups = torch.cat(shards).unflatten(0, (spec.num_kv_heads, -1))
    return [part.flatten(0, 1) for part in groups.split([queries, dim, dim], dim=1)]


def shard_shape(weight: Weight, spec: ModelSpec, tp: int) -> Shape:
    """Shape of a rank's megatron shard."""
    shapes = weight.shapes(spec)
    if weight.split is Split.VOCAB:
        return (spec.padded_vocab_size // tp, *shapes[0][1:])
    if weight.split is Split.REPLICATED:
        return shapes[0]
    if weight.split is Split.COLUMNS:
        return (shapes[0][0], shapes[0][1] // tp)
    return (sum(shape[0] for shape in shapes) // tp, *shapes[0][1:])
