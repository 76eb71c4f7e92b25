"""The adapters of a model as entries of the table of weights: two behind each linear layer's weight that has one.

    weight                        A                                        B
    rows cut (QKV, GATED, ROWS)   whole: a part's below that before        cut as the weight's rows
    columns cut (COLUMNS)         cut as the weight's columns              whole
    not cut (REPLICATED)          whole                                    whole

So the splits that weights have serve adapters too, in training, in the engine and in checkpoints. Where a weight is of
several linear layers and some of these have no adapter, A and B are zero there: so are their gradients, for ever.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from hybridflow.architecture.lora import Lora
from hybridflow.architecture.mixers.latent import ABSORBED, WHOLE
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Shapes, Weight

WEIGHT, A, B = ".weight", ".lora_a", ".lora_b"
HF = {A: ".lora_A.weight", B: ".lora_B.weight"}  # PEFT's names, behind that of the module
ROW_SPLITS = (Split.QKV, Split.GATED, Split.ROWS, Split.PARTS)
CONVOLUTION = ".conv1d.weight"  # no matrix
WIDE_NORM = "_layernorm.weight"  # of norms over all heads
WITHOUT = (CONVOLUTION, ABSORBED, WIDE_NORM)


def is_linear(weight: Weight) -> bool:
    """Whether this is the matrix of one or more linear layers that may have adapters: not an expert's, not a router."""
    cut = weight.split in (*ROW_SPLITS, Split.COLUMNS) or weight.megatron.endswith(WHOLE)
    return (
        cut
        and not weight.experts
        and weight.megatron.startswith("decoder.layers.")
        and weight.megatron.endswith(WEIGHT)
        and not weight.megatron.endswith(WITHOUT)
    )


def modules_of(weight: Weight) -> tuple[str, ...]:
    """HuggingFace's names of the linear layers whose weights, or adapters, these are."""
    endings = (WEIGHT,) if not weight.adapter else (HF[A], HF[B])
    return tuple(next(name.removesuffix(end) for end in endings if name.endswith(end)) for name in weight.hf)


@lru_cache(maxsize=1 << 12)  # so that equal weights stay equal: shapes are functions
def adapter_weights(weight: Weight, lora: Lora | None) -> tuple[Weight, ...]:
    """A and B of a weight; none where it has no adapter."""
    if lora is None or not is_linear(weight) or not any(map(lora.adapts, modules_of(weight))):
        return ()
    rank, by_rows = lora.rank, weight.split in ROW_SPLITS

    def shapes_of_a(spec: ModelSpec) -> tuple[Shape, ...]:
        return tuple((rank, inputs) for _, inputs in weight.part_shapes(spec))

    def shapes_of_b(spec: ModelSpec) -> tuple[Shape, ...]:
        return tuple((outputs, rank) for outputs, _ in weight.part_shapes(spec))

    def matrix(of: Literal["a", "b"], shapes: Shapes, *, is_cut: bool) -> Weight:
        end = {"a": A, "b": B}[of]
        megatron, engine = (name.removesuffix(WEIGHT) + end for name in (weight.megatron, weight.engine))
        return replace(
            weight,
            megatron=megatron,
            engine=engine,
            hf=tuple(module + HF[end] for module in modules_of(weight)),
            part_shapes=shapes,
            split=weight.split if is_cut else Split.REPLICATED,
            engine_split=weight.engine_split if is_cut else None,
            runs=weight.runs if is_cut else None,
            stored="",
            adapter=of,
        )

    return matrix("a", shapes_of_a, is_cut=not by_rows), matrix("b", shapes_of_b, is_cut=by_rows)
