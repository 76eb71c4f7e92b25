"""What vLLM has to be told of the actor's model beside the directory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from hybridflow.architecture.spec import TEXT_CONFIG, ModelSpec
from hybridflow.architecture.wrapper import unwrapped
from hybridflow.parallel.versions import replace_in
from hybridflow.rollout.device import EngineDevice


def leave_out_images(architecture: str) -> None:
    """Have vLLM's own loader read the language model out of a directory with what reads images.

    architecture: of the language model. The trainer's weights need no such loader.
    """
    from vllm.model_executor.models import ModelRegistry

    model: Any = ModelRegistry.models[architecture].load_model_cls()
    theirs = model.load_weights

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        named = ((unwrapped(name), tensor) for name, tensor in weights)
        return theirs(self, ((name, tensor) for name, tensor in named if name is not None))

    replace_in(model, load_weights=load_weights)


@dataclass(frozen=True)
class LanguageModel:
    """architecture: HuggingFace's name of the language model. wrapped: what reads images lies beside it.

    has_states: some layers are gated delta nets, of which vLLM keeps a state a sequence.
    latent: the layers have latent attention.
    fields: what else of config.json vLLM reads otherwise.
    one_table: layers with windows keep all tokens, as those without do.
    """

    architecture: str
    tied: bool
    wrapped: bool = False
    has_states: bool = False
    latent: bool = False
    one_table: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: ModelSpec, *, window_tables: bool = True) -> "LanguageModel":
        """window_tables: layers with windows have tables of blocks of their own, where others have none."""
        return cls(
            spec.language_model,
            spec.tied,
            spec.wrapped,
            has_states=spec.delta is not None,
            one_table=_has_both(spec) and not window_tables,
            latent=spec.latent is not None,
            fields=spec.engine_fields,
        )

    @property
    def needs_words(self) -> bool:
        """Whether vLLM by itself would not compute the model, or would otherwise."""
        return self.has_states or self.latent or self.wrapped

    @property
    def from_files(self) -> "LanguageModel":
        """For vLLM's own loader, which reads published weights: without the override of quantization_config."""
        return replace(self, fields={key: x for key, x in self.fields.items() if key != "quantization_config"})

    @property
    def _overrides(self) -> dict[str, Any] | Callable[[Any], Any]:
        """Of config.json. vLLM knows that file and safetensors alone, and the trainer may have found another head."""
        if not self.wrapped:
            return {"tie_word_embeddings": self.tied, **self.fields}
        return self._of_text

    def _of_text(self, config: Any) -> Any:
        """The language model's part. vLLM asks for it more than once."""
        text = getattr(config, TEXT_CONFIG, config)
        text.architectures = [self.architecture]
        text.tie_word_embeddings = self.tied
        vars(text).update(self.fields)
        return text

    def prepared(self, device: EngineDevice) -> EngineDevice:
        """The device, when vLLM can compute the model there."""
        if self.has_states:
            device.prepare_states(self.architecture)
        if self.latent:
            device.prepare_latent()
        return device

    def arguments(self, device: Literal["cuda", "cpu"], *, prefix_caching: bool) -> dict[str, Any]:
        """Of vLLM's LLM. A state is kept in float32, as the trainer has it; of cached prefixes vLLM keeps none.

        Of vLLM's two kinds of latent attention on CPUs the one that is not taken packs a weight, and frees the weight.
        One table of blocks is what the size of the cache is planned by, where stages have other shares of windows.
        """
        more: dict[str, Any] = {"mamba_ssm_cache_dtype": "float32"} if self.has_states else {}
        if self.latent and device == "cpu":
            more["attention_backend"] = "CPU_MLA"
        if self.one_table:
            more["disable_hybrid_kv_cache_manager"] = True
        caching = prefix_caching and not self.has_states
        return {"hf_overrides": self._overrides, "enable_prefix_caching": caching, **more}


def _has_both(spec: ModelSpec) -> bool:
    """Layers with windows, and others."""
    return "window" in spec.mixers and len(set(spec.mixers)) > 1
