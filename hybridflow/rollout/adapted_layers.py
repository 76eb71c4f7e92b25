"""Adapters in vLLM's linear layers, as parameters of the layers: they are the trainer's memory, as weights are.

vLLM's own adapters would be copies in 16 bits, written anew at each sync, and take other kernels. Here a layer computes
y + scale B (A x) of what it reads and gives itself: in compiled code and CUDA graphs as in any other.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear, UnquantizedLinearMethod

from hybridflow.architecture.adapter_weights import A, B
from hybridflow.errors import EnvironmentProblem
from hybridflow.rollout.adapters import EngineAdapters


class AdaptedLinearMethod(UnquantizedLinearMethod):
    """Of a layer with `lora_a` (parts x rank, in) and `lora_b` (out, rank), the rows of the parts one below the other.

    Of a row-parallel layer both the outputs and A's, whose columns are cut as well, are summed over the ranks, in one
    message. B's product is added behind it, as the trainer does: in 16 bits sums in another order would be others.
    """

    def __init__(self, rank: int, scale: float, outputs: tuple[int, ...], *, sums: bool) -> None:
        """outputs: rows of each part. sums: over the ranks, here and not in the layer."""
        super().__init__()
        self._rank, self._scale, self._outputs, self._sums = rank, scale, outputs, sums

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = super().apply(layer, x, bias)
        a, b = layer.lora_a, layer.lora_b
        assert isinstance(a, Tensor) and isinstance(b, Tensor), "they are parameters"
        hidden = linear(x, a) * self._scale
        if self._sums:
            summed = tensor_model_parallel_all_reduce(torch.cat([out, hidden], dim=-1))
            out, hidden = summed.split([out.shape[-1], hidden.shape[-1]], dim=-1)
        if len(self._outputs) == 1:
            return _added(out, hidden, b)
        each = (out.split(self._outputs, dim=-1), hidden.split(self._rank, dim=-1), b.split(self._outputs))
        return torch.cat([_added(*part) for part in zip(*each, strict=True)], dim=-1)


def _added(out: Tensor, hidden: Tensor, b: Tensor) -> Tensor:
    """Rounded once."""
    added: Tensor = torch.addmm(out.flatten(0, -2), hidden.flatten(0, -2), b.t()).unflatten(0, out.shape[:-1])
    return added


def add_adapters(model: nn.Module, adapters: EngineAdapters) -> None:
    """Give the model's linear layers their adapters, without memory. Layers of other stages are not there.

    Errors: EnvironmentProblem, where vLLM computes a layer in another way than by the weight as it is.
    """
    for name, layer in model.named_modules():
        if name in adapters.parts and not _is_elsewhere(layer):
            _adapt(name, layer, adapters, adapters.parts[name])


def _is_elsewhere(layer: nn.Module) -> bool:
    return not list(layer.named_parameters(recurse=False))


def _adapt(name: str, layer: Any, adapters: EngineAdapters, parts: tuple[int, ...]) -> None:
    if not isinstance(layer, LinearBase) or type(layer.quant_method) is not UnquantizedLinearMethod:
        found = type(getattr(layer, "quant_method", layer)).__name__
        raise EnvironmentProblem(f"{name}: vLLM computes this layer by {found}, which takes no adapter")
    weight: Any = layer.weight
    rows, inputs = weight.shape
    outputs = (rows,) if len(parts) == 1 else _outputs(layer, parts)
    assert sum(outputs) == rows, f"{name}: {outputs} of {parts} parts, {rows} rows"
    for end, shape in ((A, (len(parts) * adapters.rank, inputs)), (B, (rows, adapters.rank))):
        empty = torch.empty(shape, dtype=weight.dtype, device="meta")
        layer.register_parameter(end[1:], nn.Parameter(empty, requires_grad=False))
    sums = isinstance(layer, RowParallelLinear) and bool(layer.reduce_results) and layer.tp_size > 1
    if sums:
        vars(layer)["reduce_results"] = False
    layer.quant_method = AdaptedLinearMethod(adapters.rank, adapters.scale, outputs, sums=sums)


def _outputs(layer: Any, parts: tuple[int, ...]) -> tuple[int, ...]:
    """This rank's rows of each part, of which vLLM may have several sizes."""
    sizes: list[int] = list(layer.output_partition_sizes)
    assert len(sizes) == sum(parts), f"{len(sizes)} sizes of {parts} parts"
    ends = list(accumulate(parts))
    return tuple(sum(sizes[end - count : end]) for end, count in zip(ends, parts, strict=True))
