"""Arguments of vLLM's engine and of models that a config hands on, by the vendors' own names.

But for `HfOverrides` they change speed or memory, and not what is computed. Whatever else decides the engine or a model
has a key of its own.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import JsonValue, NonNegativeFloat, NonNegativeInt, PositiveInt

from hybridflow.config.section import Section


class VendorArguments(Section):
    """null: the vendor's own default, or hybridflow's."""

    def given(self) -> dict[str, Any]:
        """Those that are not null, by name."""
        return {name: value for name, value in self if value is not None}


PassName = Literal[
    "eliminate_noops",
    "enable_qk_norm_rope_fusion",
    "fuse_act_padding",
    "fuse_act_quant",
    "fuse_allreduce_rms",
    "fuse_attn_quant",
    "fuse_mla_dual_rms_norm",
    "fuse_norm_quant",
    "fuse_qk_norm_rope_kvcache",
    "fuse_rope_kvcache",
    "fuse_rope_kvcache_cat_mla",
]


class CompilationArguments(Section):
    """Of vLLM's CompilationConfig."""

    pass_config: dict[PassName, bool] = {}
    """Passes of vLLM's compiler, by the names of vLLM's PassConfig. fuse_allreduce_rms is false where nobody asks for
    this pass."""


class EngineArguments(VendorArguments):
    """Arguments of vLLM's engine, by the names of vLLM's EngineArgs."""

    async_scheduling: bool | None = None
    """Whether the next step is scheduled while the GPU computes."""
    attention_backend: str | None = None
    """The kernels of attention, by vLLM's names, such as FLASH_ATTN or FLASHINFER."""
    compilation_config: CompilationArguments | None = None
    """How vLLM compiles the model."""
    cudagraph_capture_sizes: tuple[PositiveInt, ...] | None = None
    """Numbers of tokens for which CUDA graphs are captured."""
    max_cudagraph_capture_size: PositiveInt | None = None
    """The largest number of tokens for which a CUDA graph is captured."""
    disable_cascade_attn: bool | None = None
    """Whether attention to a shared prefix is never computed once for several rows."""
    disable_custom_all_reduce: bool | None = None
    """Whether tensor parallel ranks sum by NCCL alone."""
    long_prefill_token_threshold: NonNegativeInt | None = None
    """Tokens from which on a prompt counts as long. 0: none does."""
    optimization_level: Literal[0, 1, 2, 3] | None = None
    """How much vLLM compiles before the first step."""
    prefill_schedule_interval: PositiveInt | None = None
    """Steps between two that take new prompts."""
    scheduler_reserve_full_isl: bool | None = None
    """Whether a prompt waits until the KV cache has room for all of the prompt."""
    watermark: NonNegativeFloat | None = None
    """Share of the KV cache that new rows leave free."""

    def given(self) -> dict[str, Any]:
        """As vLLM takes them."""
        given = super().given()
        if self.compilation_config is not None:
            given["compilation_config"] = self.compilation_config.model_dump()
        return given


class MegatronArguments(VendorArguments):
    """Arguments of a model, by the names of megatron-core's TransformerConfig."""

    attention_backend: Literal["flash", "fused"] | None = None
    """flash or null: flash attention of torch, 3 where it is there and right, else 2. fused: that of cuDNN."""
    batch_p2p_comm: bool | None = None
    """Whether a pipeline stage sends and receives in one batched call."""
    deallocate_pipeline_outputs: bool | None = None
    """Whether a stage frees what has been sent on."""
    gradient_accumulation_fusion: bool | None = None
    """Whether Transformer Engine or apex adds gradients within the product of matrices. null: where one is there."""
    memory_efficient_layer_norm: bool | None = None
    """Whether norms of Transformer Engine keep their output in place of their input."""
    microbatch_group_size_per_vp_stage: PositiveInt | None = None
    """Micro-batches that a model chunk of the interleaved schedule takes one after the other."""
    overlap_p2p_comm: bool | None = None
    """Whether the interleaved schedule computes while activations travel."""
    persist_layer_norm: bool | None = None
    """Whether megatron's own norms take their persistent kernel."""


class HfOverrides(VendorArguments):
    """Fields of a model's config.json that take the place of the file's, by the names of transformers."""

    max_position_embeddings: PositiveInt | None = None
    """The longest sequence that the model takes, in tokens."""
    rope_parameters: dict[str, JsonValue] | None = None
    """The rotary embedding: rope_type, and the numbers of that type, without those of other types. rope_theta stays
    the file's unless it stands here. Where layers with windows turn otherwise: that of the other layers."""
    rope_scaling: dict[str, JsonValue] | None = None
    """The name of rope_parameters before transformers 5. Either, not both."""


def vendor_lines(named: Mapping[str, VendorArguments]) -> list[str]:
    """What a run says first of the arguments that it hands on. named: by key of the config."""
    return [
        f"{key}: {', '.join(f'{name}={value}' for name, value in arguments.given().items())}"
        for key, arguments in named.items()
        if arguments.given()
    ]
