"""What an entry of the table of weights says of a parameter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridflow.architecture.layer_kinds import LayerKind
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.parallel.layout import Group

Shape = tuple[int, ...]
Shapes = Callable[[ModelSpec], tuple[Shape, ...]]
Runs = Callable[[ModelSpec], tuple[int, ...]]
LAYERS, OPT_LAYERS = "model.layers.{layer}.", "model.decoder.layers.{layer}."


@dataclass(frozen=True)
class Weight:
    """One parameter of a model.

    Names hold `{layer}` where there is one a layer, counted over the whole model, and `{expert}` where there is a part
    an expert; `for_layer` and `for_experts` fill them in.
    """

    megatron: str
    hf: tuple[str, ...]
    engine: str
    split: Split
    part_shapes: Shapes  # of the HuggingFace parts, of one expert
    stored: str = ""  # in a torch_dist checkpoint, where that is not the name in megatron's local layers
    engine_split: Split | None = None  # of the engine, where it is another
    experts: int = 0  # how many stand one below the other in this parameter; 0: it belongs to no expert
    layer: int | None = None
    float32: bool = False  # whatever the model's dtype, here and in the engine
    adapter: Literal["", "a", "b"] = ""  # which matrix of an adapter it is (`architecture.lora`)
    runs: Runs | None = None  # how many rows each run of PARTS has, of one expert
    stacked: bool = True  # in a torch_dist checkpoint with the same weight of the other layers, which are all alike

    @property
    def group(self) -> Group:
        """Which of a layout's groups of weights it is cut with."""
        return "experts" if self.experts else "dense"

    def shapes(self, spec: ModelSpec) -> tuple[Shape, ...]:
        return self.part_shapes(spec) * max(self.experts, 1)

    def for_layer(self, layer: int) -> "Weight":
        def filled(name: str) -> str:
            return name.replace("{layer}", str(layer))

        hf = tuple(filled(name) for name in self.hf)
        return replace(self, megatron=filled(self.megatron), hf=hf, engine=filled(self.engine), layer=layer)

    def for_experts(self, num_experts: int) -> "Weight":
        """The weight with the parts of every expert, if there are parts of experts."""
        if "{expert}" not in self.hf[0]:
            return self
        hf = tuple(name.replace("{expert}", str(expert)) for expert in range(num_experts) for name in self.hf)
        return replace(self, hf=hf, experts=num_experts)


@dataclass(frozen=True)
class Table:
    """The parameters of a family."""

    embeddings: tuple[Weight, ...]  # of the tokens, and of the positions where they are learned
    layers: Mapping[LayerKind, tuple[Weight, ...]]  # of each kind that there may be
    final: tuple[Weight, ...]  # between the last layer and the head: a norm


def hidden(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size,),)


def at_top(megatron: str, name: str, split: Split, shapes: Shapes) -> Weight:
    """Of no layer."""
    return Weight(megatron, (name,), name, split, shapes)


def in_layer(
    megatron: str, hf: str, split: Split, shapes: Shapes, *, at: str = LAYERS, engine: str = "", **others: Any
) -> Weight:
    """hf: the names of the parts, separated by spaces; the engine's is the same where it is not given.

    others: fields of `Weight`.
    """
    parts = tuple(at + name for name in hf.split())
    return Weight("decoder.layers.{layer}." + megatron, parts, at + (engine or hf), split, shapes, **others)


def with_bias(
    megatron: str, name: str, weight: tuple[Split, Shapes], bias: tuple[Split, Shapes], stored: str = ""
) -> tuple[Weight, ...]:
    """Weight and bias of a layer of OPT, whose engine calls them as HuggingFace does."""
    return tuple(
        in_layer(f"{megatron}.{kind}", f"{name}.{kind}", *cut, stored=stored and stored + kind, at=OPT_LAYERS)
        for kind, cut in (("weight", weight), ("bias", bias))
    )
