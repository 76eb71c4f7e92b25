"""What a run will hold in device memory, from shapes alone. Pure: no tensors, no process group, no weights.

Weights, gradients and optimizer state are exact but for padding: with ZeRO-1 megatron pads every parameter to 64
elements and every bucket to a multiple of the data-parallel size, which is not counted. Activations are an estimate.
Not counted here: what libraries take, which `placement.margin` has; temporaries of the optimizer, and what fills the
last page (2 MiB) of each bucket that the engine gathers. b is the bytes of an element, t the tokens of a micro-batch.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, fields
from functools import cache, partial, reduce
from math import ceil, prod
from typing import NamedTuple

from hybridflow.architecture.layer_kinds import LayerKind
from hybridflow.architecture.mixers.known import MIXERS
from hybridflow.architecture.mlps.known import MLPS
from hybridflow.architecture.parts import shard_shape
from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.architecture.tables import table_of
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import embedding, head_weights, is_trained, layer_weights
from hybridflow.config import OptimizerConfig, TrainedRoleConfig
from hybridflow.config.recompute import Recompute, modules_of
from hybridflow.parallel.host_memory import SLOTS, part_blocks
from hybridflow.parallel.layout import Cut, Layout
from hybridflow.parallel.vocab import BACKWARD_COPIES, FORWARD_COPIES, chunks_of_rows, rows_of_chunk
from hybridflow.placement.context_parallel import context_bytes

MAIN_BYTES = 4  # gradients, main weights and moments are float32
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MLP = ".mlp."  # in megatron's names of weights


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank by kind."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


KINDS = tuple(field.name for field in fields(Footprint))


def together(footprints: Sequence[Footprint]) -> Footprint:
    """Of models on one rank: they take turns to compute, so of the activations only the largest count."""

    def add(one: Footprint, other: Footprint) -> Footprint:
        sums = {kind: getattr(one, kind) + getattr(other, kind) for kind in KINDS}
        return Footprint(**(sums | {"activations": max(one.activations, other.activations)}))

    return reduce(add, footprints, Footprint())


# ------------------------------------------------------------------------------------------------ kept all the time


def stage_elements(spec: ModelSpec, head: Head, layout: Layout, *, trained: bool = False) -> tuple[int, ...]:
    """Elements of the weights on a rank of each pipeline stage; head: "lm" or "score". trained: of those alone.

    The sum of `shard_shape` over the weights of the stage. Tensor-parallel ranks hold alike. A tied output layer is
    the embedding, of which the last of several stages holds a copy. Errors: ValueError as `Layout.stages`.
    """
    parts = _parts(spec, head, layout.cut, trained)
    kinds = [Counter(map(spec.layer_kind, layers)) for layers in layout.stages(spec.num_layers)]
    elements = [sum(parts.layers[kind] * count for kind, count in counts.items()) for counts in kinds]
    elements[0] += parts.first
    elements[-1] += parts.last + (parts.copied if layout.pp > 1 else 0)
    return tuple(elements)


def expert_elements(spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """Of `stage_elements`, those of experts, which are trained."""
    if not spec.num_experts or spec.lora is not None:
        return (0,) * layout.pp
    of_layer = {
        kind: sum(prod(shard_shape(w, spec, layout.cut)) for w in layer_weights(spec, kind) if w.group == "experts")
        for kind in spec.layer_kinds
    }
    return tuple(sum(of_layer[spec.layer_kind(layer)] for layer in layers) for layers in layout.stages(spec.num_layers))


class _Parts(NamedTuple):
    """Elements of a tensor-parallel rank."""

    first: int  # on the first stage beside the layers
    layers: dict[LayerKind, int]  # each layer of the kind
    last: int
    copied: int  # of what the last of several stages holds again


@cache
def _parts(spec: ModelSpec, head: Head, cut: Cut, trained: bool) -> _Parts:
    def elements(weights: Iterable[Weight]) -> int:
        wanted = (weight for weight in weights if not trained or is_trained(weight, spec))
        return sum(prod(shard_shape(weight, spec, cut)) for weight in wanted)

    table = table_of(spec)
    copied = [embedding(spec)] if spec.tied and head == "lm" else []
    layers = {kind: elements(weight.for_layer(0) for weight in layer_weights(spec, kind)) for kind in spec.layer_kinds}
    last = elements((*table.final, *head_weights(spec, head)))
    return _Parts(elements(table.embeddings), layers, last, elements(copied))


def model_elements(spec: ModelSpec, head: Head) -> int:
    """Of the whole model, the rows that pad the vocabulary included: the M of papers in elements."""
    return stage_elements(spec, head, Layout(1, 1, 1, (0,)))[0]


def gradient_bytes(elements: int) -> int:
    """4 elements: megatron's buffers are float32 (grad_reduce_in_fp32) and whole on each replica, with ZeRO-1 too."""
    return MAIN_BYTES * elements


def optimizer_bytes(elements: int, optimizer: OptimizerConfig, *, dtype: str, copies: int) -> int:
    """Main weights and moments after the first update, (main + moments) elements / (copies with ZeRO-1).

    main: 4 bytes for bfloat16 models; the weights of float32 models are their own main weights. moments: 8 bytes for
    Adam, 4 for SGD with momentum, 0 without. ZeRO-1 (Rajbhandari et al. 2020, stage 1) splits both over the copies;
    megatron's distributed optimizer knows Adam alone.
    """
    moments = {"adam": 2 * MAIN_BYTES, "sgd": MAIN_BYTES if optimizer.momentum else 0}[optimizer.name]
    main = MAIN_BYTES if dtype == "bfloat16" else 0
    shares = copies if optimizer.zero1 and optimizer.name == "adam" else 1
    return ceil(elements * (main + moments) / shares)


def stage_optimizer_bytes(spec: ModelSpec, head: Head, layout: Layout, config: TrainedRoleConfig) -> tuple[int, ...]:
    """`optimizer_bytes` on a rank of each stage: of experts there may be fewer copies than replicas."""
    elements, experts = stage_elements(spec, head, layout, trained=True), expert_elements(spec, layout)
    return tuple(
        optimizer_bytes(each - own, config.optimizer, dtype=config.dtype, copies=layout.copies("dense"))
        + optimizer_bytes(own, config.optimizer, dtype=config.dtype, copies=layout.copies("experts"))
        for each, own in zip(elements, experts, strict=True)
    )


def staged_bytes(state_bytes: int) -> int:
    """Of an optimizer's state in host memory, what a step has on the device at a time: the parts of all slots."""
    return min(state_bytes, SLOTS * part_blocks(state_bytes)[1])


# ------------------------------------------------------------------------------------------------ activations


def layer_bytes(
    spec: ModelSpec,
    kind: LayerKind,
    *,
    cut: Cut,
    sequence_parallel: bool,
    recompute: Recompute,
    itemsize: int,
    over_ranks: bool = False,
) -> float:
    """Bytes a token that a layer keeps for the backward pass.

    Korthikanti et al. 2022 (arXiv 2205.05198), equations 1 (none), 2 (tensor parallel) and 4 (with sequence parallel),
    without dropout and masks, without the s^2 terms, which flash attention never stores, with SwiGLU in place of
    GELU and grouped keys and values. With b = bytes of an element, h = hidden size, sp = tp with sequence parallelism:

        none       norms (`norm_bytes`), the mixer (`architecture.mixers`) and the MLP (`architecture.mlps`)
        full       b h / sp: the layer runs again from the input
        adapters   2 b A's outputs more, which column-parallel layers gather, but for what runs again as a whole

    over_ranks: with context parallelism.
    """
    tp, sp = cut.tp, cut.tp if sequence_parallel else 1
    if recompute == "full":
        return itemsize * spec.hidden_size / sp
    again = modules_of(recompute)
    of_heads, own = MIXERS[kind.mixer].activation_bytes(
        spec, again="core_attn" in again, itemsize=itemsize, over_ranks=over_ranks
    )
    norms = norm_bytes(spec, kind, cut=cut, sequence_parallel=sequence_parallel, again=again, itemsize=itemsize)
    mlp = MLPS[kind.mlp].activation_bytes(
        spec, cut=cut, sequence_parallel=sequence_parallel, again=again, itemsize=itemsize
    )
    return norms + mlp + 2 * itemsize * adapter_columns(spec, kind, again) + (of_heads / tp + own / sp)


@cache
def adapter_columns(spec: ModelSpec, kind: LayerKind, again: Set[str] = frozenset()) -> int:
    """What a layer's A give of a token, but for those of an MLP, a mixture or a shared expert that runs again."""
    whole = MLPS[kind.mlp].runs_again(again)
    return sum(
        weight.shapes(spec)[0][0] * len(weight.hf)
        for weight in layer_weights(spec, kind)
        if weight.adapter == "a" and not (whole and MLP in weight.megatron)
    )


def norm_bytes(
    spec: ModelSpec, kind: LayerKind, *, cut: Cut, sequence_parallel: bool, again: Set[str], itemsize: int
) -> float:
    """With h = hidden size, sp = tp with sequence parallelism, else 1:

    b 4 h / sp     inputs and outputs of both norms; 6 h with the inputs of norms behind. Less:
    h / sp         of a mixture whose ranks gather all tokens: what they gather is the mixture's, unless `moe` is in it
    2 h / sp       layernorm: the outputs of the norms in front
    """
    kept = 6 if spec.traits.norms.place == "around" else 4
    gathers = MLPS[kind.mlp].gathers(cut, sequence_parallel=sequence_parallel)
    is_kept = "moe" in again or not gathers  # what the MLP reads
    kept -= 0 if is_kept else 1
    if "layernorm" in again and spec.has_norms_in_front:
        kept -= 2 if is_kept else 1
    return itemsize * kept * spec.hidden_size / (cut.tp if sequence_parallel else 1)


def _passing_bytes(spec: ModelSpec, kind: LayerKind, *, cut: Cut, itemsize: int, counted: bool) -> float:
    return MLPS[kind.mlp].passing_bytes(spec, cut=cut, itemsize=itemsize, counted=counted)


def again_bytes(
    spec: ModelSpec, kind: LayerKind, *, cut: Cut, sequence_parallel: bool, recompute: Recompute, itemsize: int
) -> float:
    """Bytes a token of what is made again at a time: a whole layer, or an MLP or a mixture with what it reads.

    What attention makes again is not counted.
    """
    if recompute == "full":
        whole = partial(layer_bytes, spec, kind, cut=cut, sequence_parallel=sequence_parallel, itemsize=itemsize)
        return whole(recompute="none")
    mlp = partial(
        MLPS[kind.mlp].activation_bytes, spec, cut=cut, sequence_parallel=sequence_parallel, itemsize=itemsize
    )
    norms = partial(norm_bytes, spec, kind, cut=cut, sequence_parallel=sequence_parallel, itemsize=itemsize)
    again = modules_of(recompute)
    dropped = norms(again=again - {"layernorm"}) - norms(again=again)
    return mlp(again=frozenset()) - mlp(again=again) + dropped / 2  # one norm at a time


def chunks_in_flight(layout: Layout, stage: int) -> int:
    """Micro-batches times model chunks whose activations a stage keeps at once.

    1F1B: pp - stage. Interleaved with v chunks: 2 (pp - 1 - stage) + (v - 1) pp + 1, which is megatron's warm-up and
    one more; on stage 0 this is Korthikanti et al.'s factor 1 + (pp - 1) / (pp v), section 4.2.3, of pp v.
    """
    if layout.vpp == 1:
        return layout.pp - stage
    return 2 * (layout.pp - 1 - stage) + (layout.vpp - 1) * layout.pp + 1


def training_activation_bytes(
    spec: ModelSpec,
    layout: Layout,
    stage: int,
    *,
    head: Head,
    itemsize: int,
    sequence_parallel: bool,
    recompute: Recompute,
    tokens: int,
    replica_tokens: int,
) -> int:
    """Estimate: layers of the stage x micro-batches in flight x `layer_bytes`, and the larger of what comes after them
    on the last stage and of what one layer makes again, and of what passes in it: outputs are gone by then.

    After the layers come the last norm's input and output, 2 h / sp, the whole state that sequence-parallel ranks
    gather, h, and `output_bytes`. Of embeddings that are projected, those that the first stage keeps for the matrix's
    gradient, too.
    tokens: of a micro-batch; replica_tokens: of all micro-batches of a replica, which bounds what is in flight.
    """
    one_layer = partial(layer_bytes, spec, cut=layout.cut, sequence_parallel=sequence_parallel, itemsize=itemsize)
    kinds = Counter(map(spec.layer_kind, layout.stages(spec.num_layers)[stage]))
    in_flight = min(chunks_in_flight(layout, stage) * tokens / layout.vpp, replica_tokens)
    of_kind = partial(one_layer, recompute=recompute, over_ranks=layout.cp > 1)
    kept = in_flight * sum(count * of_kind(kind) for kind, count in kinds.items())
    made_again = partial(again_bytes, spec, cut=layout.cut, sequence_parallel=sequence_parallel, itemsize=itemsize)
    counted = "moe" in modules_of(recompute)
    passing = partial(_passing_bytes, spec, cut=layout.cut, itemsize=itemsize, counted=counted)
    again = tokens * max(passing(kind) + made_again(kind, recompute=recompute) for kind in kinds)
    again += context_bytes(spec, layout, itemsize=itemsize, tokens=tokens, backward=True)
    last = stage == layout.pp - 1
    gathered = (2 / layout.tp + 1 if sequence_parallel and layout.tp > 1 else 2) * spec.hidden_size * itemsize
    outputs = output_bytes(spec, head, tp=layout.tp, itemsize=itemsize, rows=tokens, backward=True) if last else 0
    ends = tokens * gathered + outputs if last else 0
    embedded = in_flight * itemsize * (spec.projected_size or 0) if stage == 0 else 0
    return ceil(embedded + kept + max(again, ends))


def forward_activation_bytes(
    spec: ModelSpec, layout: Layout, stage: int, *, head: Head, itemsize: int, sequence_parallel: bool, tokens: int
) -> int:
    """Estimate for a pass without gradients: all that one layer makes, or the outputs; the larger of the two."""
    one_layer = partial(layer_bytes, spec, cut=layout.cut, sequence_parallel=sequence_parallel, itemsize=itemsize)
    kinds = set(map(spec.layer_kind, layout.stages(spec.num_layers)[stage]))
    passing = partial(_passing_bytes, spec, cut=layout.cut, itemsize=itemsize, counted=True)
    layer = tokens * max(one_layer(kind, recompute="none") + passing(kind) for kind in kinds)
    layer += context_bytes(spec, layout, itemsize=itemsize, tokens=tokens)
    last = stage == layout.pp - 1
    outputs = output_bytes(spec, head, tp=layout.tp, itemsize=itemsize, rows=tokens) if last else 0
    return ceil(max(layer, outputs))


def output_bytes(spec: ModelSpec, head: Head, *, tp: int, itemsize: int, rows: int, backward: bool = False) -> int:
    """The wanted rows of the last hidden state, and logits in the model's dtype or, in float32, their values.

    Where the embeddings have another size, the rows projected to it are there beside them. Of many rows not all logits
    exist at once (`models.output_layer`); their gradient is written over them, by chunks of rows with float32 copies.
    backward: beside them the gradient of the rows and, in place of the copies if it is larger, that of the weight.
    A value head takes rows in float32, which is a copy where the model is in 16 bits.
    """
    hidden = spec.hidden_size + (spec.projected_size or 0)
    if head == "lm":
        columns = spec.padded_vocab_size // tp
        at_once = max((chunk.stop - chunk.start for chunk in chunks_of_rows(rows, columns)), default=0)
        copies = BACKWARD_COPIES if backward else FORWARD_COPIES
        beside = 4 * copies * min(at_once, rows_of_chunk(columns, "cuda")) * columns
        if backward:
            size = itemsize * spec.embedding_size
            beside = rows * size + max(beside, columns * size)
        return itemsize * (rows * hidden + at_once * columns) + beside
    widened = 4 * spec.embedding_size if itemsize < 4 else 0
    return rows * (itemsize * hidden + widened + 4)


def engine_activation_bytes(spec: ModelSpec, *, cut: Cut, itemsize: int, tokens: int, sequences: int) -> int:
    """Estimate for the engine: one layer of a full step, or the float32 logits of all sequences, gathered over tp."""
    one_layer = partial(layer_bytes, spec, cut=cut, sequence_parallel=False, recompute="none", itemsize=itemsize)
    layer = tokens * max(map(one_layer, spec.layer_kinds))
    return ceil(max(layer, 4 * sequences * spec.padded_vocab_size))


def sampler_bytes(spec: ModelSpec, *, sequences: int) -> int:
    """What the sampler of the engine's second model runner keeps of every sequence: how often it has which token.

    4 bytes for each token of the vocabulary, and a bit (vLLM 0.32.0, v1/worker/gpu/sample/penalties.py); it is there
    whether or not a penalty is asked for, and waits in host memory while the engine sleeps.
    """
    return sequences * 4 * (spec.vocab_size + ceil(spec.vocab_size / 32))
