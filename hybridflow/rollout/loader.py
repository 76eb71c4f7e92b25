"""A vLLM model loader that points the engine's parameters at memory the trainer owns.

It runs before vLLM's post-processing and before anything captures addresses. Weights are first made on the meta device,
so that the engine's own are never allocated. Post-processing may copy those of experts that are no contiguous memory,
until they are pointed at the trainer's once more.

The names asked for are those of the weight table for the layers of a rank's stage; with tied embeddings the last stage
asks for the embedding by that name or as lm_head.weight. Layers have their number in the model, not in the stage.
What vLLM derives of a weight as a view (`DERIVED`) follows the weight, and nobody is asked for it.
Memory need not be contiguous: the columns that a rank has of o_proj and down_proj may be a view of a wider weight.
vLLM's compiled code is for weights of certain strides, so the key by which it is kept on disk has to know ours.

Adapters are parameters of vLLM's linear layers: the trainer's memory, as weights are. vLLM's own adapters would be
copies in 16 bits, written anew at each sync, and take other kernels. Here a layer computes y + scale B (A x) itself, in
compiled code and CUDA graphs as in any other.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from hybridflow.architecture.adapter_weights import A, B
from hybridflow.architecture.mixers.latent import DERIVED, NORM_EPS, NORMS
from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.versions import check_version, replace_in
from hybridflow.rollout.adapters import EngineAdapters
from hybridflow.rollout.expert_kernels import READ_AS_THEY_STAND, expert_methods

LOAD_FORMAT = "hybridflow_alias"  # vLLM lower-cases load formats
Source = Callable[[str], Tensor]  # engine parameter name -> the trainer's memory for it


@register_model_loader(LOAD_FORMAT)
class AliasLoader(BaseModelLoader):
    """Takes `{"source": Source, "adapters": EngineAdapters | None}` as model_loader_extra_config."""

    def __init__(self, load_config: LoadConfig) -> None:
        check_version("vllm", vllm.__version__)  # it replaces how layers make their weights
        super().__init__(load_config)
        self._source: Source = load_config.model_loader_extra_config["source"]
        self._adapters: EngineAdapters | None = load_config.model_loader_extra_config["adapters"]

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to fetch: the weights are in this process."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """As in the base class, without what is for other loaders: quantization, and collecting garbage for 0.3 s."""
        device, dtype = vllm_config.device_config.device, model_config.dtype
        assert isinstance(device, torch.device) and isinstance(dtype, torch.dtype), "vLLM has settled both by now"
        with set_default_torch_dtype(dtype):
            with device, _weights_on_meta():
                model: nn.Module = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                if self._adapters is not None:
                    add_adapters(model, self._adapters)
            _set_latent_norms(model)
            self.load_weights(model, model_config)
            process_weights_after_loading(model, model_config, device)
            _check_experts(model)
            self.load_weights(model, model_config)  # experts that are columns of wider weights were copied
        tell_compile_cache(vllm_config, model, self._adapters)
        return model.eval()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        seen: set[nn.Parameter] = set()  # a router's bias is a parameter of the experts too
        for prefix, module in model.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in seen and leaf not in DERIVED:
                    seen.add(parameter)
                    self._alias(module, leaf, parameter, f"{prefix}.{leaf}")

    def _alias(self, module: nn.Module, leaf: str, parameter: nn.Parameter, name: str) -> None:
        memory = self._source(name)
        elsewhere = memory.numel() == 0  # this stage makes the parameter and never uses it
        if parameter.dim() == 3 and not elsewhere:  # experts, one below the other
            memory = memory.unflatten(0, parameter.shape[:2])
        if (not elsewhere and memory.shape != parameter.shape) or memory.dtype != parameter.dtype:
            wanted, held = (f"{tuple(x.shape)} {x.dtype}" for x in (parameter, memory))
            raise EnvironmentProblem(f"{name}: vLLM asks for {wanted}, the trainer holds {held}")
        if parameter.is_meta:
            setattr(module, leaf, nn.Parameter(memory, requires_grad=False))
        else:
            parameter.data = memory


def _set_latent_norms(model: nn.Module) -> None:
    """vLLM 0.32.0 takes rms_norm_eps for the norms within latent attention, transformers and the trainer 1e-6."""
    for name, module in model.named_modules():
        if name.endswith(NORMS):
            vars(module)["variance_epsilon"] = NORM_EPS


def tell_compile_cache(vllm_config: VllmConfig, model: nn.Module, adapters: EngineAdapters | None = None) -> None:
    """Make the names, shapes and strides of the weights a part of the config's hash, and the scale of adapters.

    vLLM 0.32.0 keeps compiled code by a hash of config, environment and source, which is taken when the model first
    runs. The strides of weights are compiled in and are in none of the three: code for contiguous weights would be
    taken for views of wider ones, and the other way round.
    """
    weights = [(name, tuple(weight.shape), weight.stride()) for name, weight in model.named_parameters()]
    known = [weights, None if adapters is None else adapters.scale]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    assert isinstance(vllm_config.additional_config, dict), f"ours is a dict, not {vllm_config.additional_config}"
    vllm_config.additional_config = vllm_config.additional_config | {"hybridflow_weights": digest}


def _check_experts(model: nn.Module) -> None:
    """Raise EnvironmentProblem where vLLM has chosen kernels that keep the weights of experts in another order."""
    for _, method in expert_methods(model):
        if method.unquantized_backend.name not in READ_AS_THEY_STAND:
            raise EnvironmentProblem(
                f"vLLM computes experts by {method.unquantized_backend.name}, which reorders the experts' weights. "
                f"Only {', '.join(READ_AS_THEY_STAND)} can read the trainer's weights"
            )


@contextlib.contextmanager
def _weights_on_meta() -> Iterator[None]:
    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    originals: list[Callable[..., None]] = [method.create_weights for method in methods]
    for method, original in zip(methods, originals, strict=True):
        replace_in(method, create_weights=_on_meta(original))
    try:
        yield
    finally:
        for method, original in zip(methods, originals, strict=True):
            replace_in(method, create_weights=original)


def _on_meta(create_weights: Callable[..., None]) -> Callable[..., None]:
    def create(*args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            create_weights(*args, **kwargs)

    return create


# ------------------------------------------------------------------------------------------------ adapters


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
