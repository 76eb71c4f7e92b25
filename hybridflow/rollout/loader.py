"""A vLLM model loader that points the engine's parameters at memory the trainer owns.

It runs before vLLM's post-processing and before anything captures addresses. Linear and embedding weights are first
made on the meta device, so that the engine's own weights are never allocated, not even for a moment.

The names asked for (vLLM 0.32.0, Llama and Qwen2), W for `.weight`, for the layers N of a rank's stage:

    model.layers.N.: self_attn.qkv_proj.W (Qwen2: .bias too), self_attn.o_proj.W, mlp.gate_up_proj.W, mlp.down_proj.W,
                     input_layernorm.W, post_attention_layernorm.W
    first stage:     model.embed_tokens.W
    last stage:      model.norm.W, lm_head.W; with tied embeddings model.embed_tokens.W as well, for the same memory

With one stage that is all of them. N is the layer's number in the model, not in the stage. Memory need not be
contiguous: the columns that a rank has of o_proj and down_proj may be a view of a wider weight.
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
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

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

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """As in the base class, without what is for other loaders: quantization, and collecting garbage for 0.3 s."""
        device = vllm_config.device_config.device
        with set_default_torch_dtype(model_config.dtype):
            with torch.device(device):
                model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            self.load_weights(model, model_config)
            process_weights_after_loading(model, model_config, torch.device(device))
        return model.eval()

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
