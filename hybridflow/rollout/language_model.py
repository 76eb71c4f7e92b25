"""What vLLM has to be told of the actor's model beside the directory."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridflow.architecture.rope import QueryGrowth
from hybridflow.architecture.spec import TEXT_CONFIG, ModelSpec, engines_growth
from hybridflow.errors import UserError
from hybridflow.parallel.versions import replace_in
from hybridflow.rollout.device import EngineDevice


def leave_out_images(architecture: str) -> None:
    """Have vLLM's own loader read the language model out of a directory with what reads images.

    The trainer's weights need no such loader. Errors: UserError for architectures outside
    vllm.model_executor.models.qwen3_5.
    """
    if not architecture.startswith("Qwen3_5"):
        raise UserError(
            f"{architecture}: what reads images lies beside the language model, and vLLM reads neither alone. "
            "`hybridflow convert` makes a directory of the language model, which vLLM reads"
        )
    module: Any = importlib.import_module("vllm.model_executor.models.qwen3_5")
    mapper: Any = importlib.import_module("vllm.model_executor.models.utils").WeightsMapper
    model = getattr(module, architecture)
    without = model.hf_to_vllm_mapper | mapper(orig_to_new_prefix={"model.visual.": None})
    replace_in(model, hf_to_vllm_mapper=without)


@dataclass(frozen=True)
class LanguageModel:
    """architecture: HuggingFace's name of the language model. wrapped: what reads images lies beside it.

    has_states: some layers are gated delta nets, of which vLLM keeps a state a sequence.
    has_windows: in some layers attention has a window, in others it has none.
    growth: of queries with their positions, which vLLM 0.32.0 reads under a name of its own alone.
    """

    architecture: str
    tied: bool
    wrapped: bool = False
    has_states: bool = False
    has_windows: bool = False
    growth: QueryGrowth | None = None

    @classmethod
    def of(cls, spec: ModelSpec) -> "LanguageModel":
        return cls(
            spec.language_model,
            spec.tied,
            spec.wrapped,
            has_states=spec.delta is not None,
            has_windows="window" in spec.mixers and len(set(spec.mixers)) > 1,
            growth=spec.query_growth,
        )

    @property
    def _overrides(self) -> dict[str, Any] | Callable[[Any], Any]:
        """Of config.json. vLLM knows that file and safetensors alone, and the trainer may have found another head."""
        if not self.wrapped:
            return {"tie_word_embeddings": self.tied} | engines_growth(self.growth)
        return self._of_text

    def _of_text(self, config: Any) -> Any:
        """The language model's part. vLLM asks for it more than once."""
        text = getattr(config, TEXT_CONFIG, config)
        text.architectures = [self.architecture]
        text.tie_word_embeddings = self.tied
        vars(text).update(engines_growth(self.growth))
        return text

    def prepared(self, device: EngineDevice) -> EngineDevice:
        """The device, when vLLM can compute the model there."""
        if self.has_states:
            device.prepare_states(self.architecture)
        return device

    def arguments(self, *, prefix_caching: bool) -> dict[str, Any]:
        """Of vLLM's LLM. A state is kept in float32, as the trainer has it; of cached prefixes vLLM keeps none.

        Layers with windows and without share one table of blocks, by which the size of the cache is planned.
        """
        states = {"mamba_ssm_cache_dtype": "float32"} if self.has_states else {}
        tables = {"disable_hybrid_kv_cache_manager": True} if self.has_windows else {}
        caching = prefix_caching and not self.has_states
        return {"hf_overrides": self._overrides, "enable_prefix_caching": caching, **states, **tables}
