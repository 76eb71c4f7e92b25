"""A vLLM model loader that points the engine's parameters at memory the trainer owns.

It runs before vLLM's post-processing and before anything captures addresses. Linear and embedding weights are first
made on the meta device, so that the engine's own weights are never allocated, not even for a moment.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "hybridflow_alias"  # vLLM lower-cases load formats
Source = Callable[[str], Tensor]  # engine parameter name -> the trainer's memory for it


@register_model_loader(LOAD_FORMAT)
class AliasLoader(BaseModelLoader):
    """Takes `{"source": Source}` as model_loader_extra_config."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._source: Source = load_config.model_loader_extra_config["source"]

    def download_model(self, model_config: Any) -> None:
        """Nothing to fetch: the weights are in this process."""

    def create_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        with _weights_on_meta():
            return super().create_model(*args, **kwargs)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        for prefix, module in model.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                self._alias(module, leaf, parameter, f"{prefix}.{leaf}")

    def _alias(self, module: nn.Module, leaf: str, parameter: nn.Parameter, name: str) -> None:
        memory = self._source(name)
        assert memory.shape == parameter.shape and memory.dtype == parameter.dtype, (
            f"{name}: the engine wants {tuple(parameter.shape)} {parameter.dtype}, "
            f"the trainer holds {tuple(memory.shape)} {memory.dtype}"
        )
        if parameter.is_meta:
            setattr(module, leaf, nn.Parameter(memory, requires_grad=False))
        else:
            parameter.data = memory


@contextlib.contextmanager
def _weights_on_meta() -> Iterator[None]:
    methods = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    originals = [method.create_weights for method in methods]
    for method, original in zip(methods, originals, strict=True):
        method.create_weights = _on_meta(original)
    try:
        yield
    finally:
        for method, original in zip(methods, originals, strict=True):
            method.create_weights = original


def _on_meta(create_weights: Callable[..., None]) -> Callable[..., None]:
    def create(*args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            create_weights(*args, **kwargs)

    return create
