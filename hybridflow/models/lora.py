"""Adapters on megatron's linear layers: parameters `lora_a` and `lora_b` of the layers, whose own weights stay.

What a layer gives is added to after the layer has run, so any class of linear layers will do, whose input the adapter
reads too (Transformer Engine's may have no norm in them). Column-parallel: A reads this rank's tokens, and h = A x,
which is rank columns wide, is what travels. Row-parallel: A's columns are cut, and h is summed over the ranks.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from hybridflow.architecture.adapter_weights import A, B, adapter_weights, is_linear
from hybridflow.architecture.parts import matrix_of, overlaps, shard_shape
from hybridflow.architecture.shards import Split, training_shard
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import layer_weights
from hybridflow.models.layers import mark
from hybridflow.parallel.grid import Grid

Matrices = tuple[Tensor, Tensor]


class AdapterChoice:
    """Which adapters a model computes with: those that are trained, those of the reference, or none.

    reference: by the parameter that is trained in its place; empty: the reference has no adapters.
    """

    def __init__(self) -> None:
        self.of_reference = False
        self.reference: dict[Tensor, Tensor] = {}

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Within the block the model computes with the reference's adapters, without gradients."""
        self.of_reference = True
        try:
            yield
        finally:
            self.of_reference = False


@dataclass(frozen=True)
class Adapter:
    """The forward hook of a linear layer.

    parts: (rows of B, parts) ones and zeros, of which part each row is; None: there is one part.
    whole: the layer is the same on all ranks, and reads and gives this rank's tokens.
    inside: the layer stands where others sum inputs' gradients, and outputs, over the ranks.
    """

    choice: AdapterChoice
    scale: float
    parts: Tensor | None
    by_rows: bool
    inside: bool
    whole: bool
    sequence_parallel: bool
    group: ProcessGroup

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        matrices = self._matrices(layer)
        if matrices is None:
            return None
        if isinstance(output, Tensor):
            return self._added(output, inputs[0], *matrices)
        out, *rest = output
        return self._added(out, inputs[0], *matrices), *rest

    def _matrices(self, layer: nn.Module) -> Matrices | None:
        a, b = (vars(layer)["_parameters"][name[1:]] for name in (A, B))
        if not self.choice.of_reference:
            return a, b
        reference = self.choice.reference
        return (reference[a], reference[b]) if reference else None

    def _added(self, out: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """out + scale B A x, rounded once: so the engine rounds too (`rollout.loader`)."""
        if self.inside:  # a and b are summed over, in place of what they read and give
            whole, group = (a, b)[not self.by_rows], self.group
            copied = copy_to_tensor_model_parallel_region(whole, group=group)
            a, b = (copied, b) if self.by_rows else (a, copied)
        h = linear(x, a) * self.scale
        if not self.inside and not self.whole:
            h = self._exchanged(h)
        if self.parts is not None:  # each row reads the outputs of that part's A alone
            b = (b[:, None] * self.parts[:, :, None].to(b)).flatten(1)
        return torch.addmm(out.flatten(0, -2), h.flatten(0, -2), b.t()).view(out.shape)

    def _exchanged(self, h: Tensor) -> Tensor:
        """All tokens of h, where B's rows are cut; else the sum over the ranks, of the rank's tokens."""
        found: Tensor
        if self.by_rows and self.sequence_parallel:
            found = gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=True, group=self.group)
        elif self.by_rows:
            found = copy_to_tensor_model_parallel_region(h, group=self.group)
        elif self.sequence_parallel:
            found = reduce_scatter_to_sequence_parallel_region(h, group=self.group)
        else:
            found = reduce_from_tensor_model_parallel_region(h, group=self.group)
        return found


def add_adapters(chunk: nn.Module, layers: Sequence[nn.Module], spec: ModelSpec, grid: Grid) -> AdapterChoice:
    """Freeze a model and give its layers the adapters of `spec`. layers: of the decoder, with megatron's numbers.

    The adapters' values are whatever memory had: they are loaded as other weights are.
    """
    choice = AdapterChoice()
    chunk.requires_grad_(False)
    for layer in layers:
        number = vars(layer)["layer_number"] - 1
        weights = {w.megatron: w for w in layer_weights(spec, spec.layer_kind(number)) if is_linear(w)}
        for name, weight in weights.items():
            found = adapter_weights(weight, spec.lora)
            if found:
                module = layer.get_submodule(name.removeprefix("decoder.layers.{layer}.").removesuffix(".weight"))
                _adapt(module, found, choice, spec, grid)
    return choice


def _adapt(module: nn.Module, adapter: tuple[Weight, ...], choice: AdapterChoice, spec: ModelSpec, grid: Grid) -> None:
    a, b = adapter
    assert spec.lora is not None, "adapters were found"
    plain = isinstance(module, nn.Linear)  # megatron's are none
    sequence_parallel = not plain and bool(vars(module).get("sequence_parallel", False))
    by_rows = b.split is not Split.REPLICATED
    like: Any = module.weight
    for end, entry in ((A, a), (B, b)):
        shape = shard_shape(entry, spec, grid.layout.cut)
        parameter = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
        # what all ranks hold and has read this rank's tokens alone
        mark(parameter, sequence_parallel=sequence_parallel and entry.split is Split.REPLICATED, allreduce=True)
        module.register_parameter(end[1:], parameter)
    hook = Adapter(
        choice,
        scale=spec.lora.scale,
        parts=_parts(b, spec, grid, device=like.device),
        by_rows=by_rows,
        inside=plain,
        whole=a.split is Split.REPLICATED and b.split is Split.REPLICATED,
        sequence_parallel=sequence_parallel,
        group=grid.groups.tp,
    )
    module.register_forward_hook(hook)


def _parts(b: Weight, spec: ModelSpec, grid: Grid, device: torch.device) -> Tensor | None:
    """(rows of B on this rank, parts) bool."""
    if len(b.hf) == 1:
        return None
    shard = training_shard(matrix_of(b, spec), grid.place(b.group))
    found = [torch.full((each.num_rows,), each.part) for each in overlaps(b, spec, shard)]
    return torch.nn.functional.one_hot(torch.cat(found), len(b.hf)).bool().to(device)
