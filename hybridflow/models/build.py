"""Build a megatron-core model on a grid and fill it from a HuggingFace directory or a torch_dist checkpoint.

Every rank reads only the slices it holds: those of its tensor-parallel rank and its pipeline stage, in one model chunk
or, with virtual pipeline parallelism, several. The last stage of a policy model returns what makes this rank's columns
of the logits, that of a value model one scalar, both only for the rows that the micro-batch wants.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import _grad_accum_fusion_available
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridflow.architecture.rope import Rotary
from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.cpu import attention as cpu_attention
from hybridflow.cpu import layers as cpu_layers
from hybridflow.cpu.kernels.library import library
from hybridflow.models.attention import (
    AttentionFunctions,
    GroupedSelfAttention,
    PackedAttention,
    by_length_or_merged,
    flash_or_exact,
    halves,
    neighbours,
    rotation,
)
from hybridflow.models.experts import MixtureOfExperts
from hybridflow.models.layers import LayerNorm, ReLU, RMSNorm, SwiGLU
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.models.named_weights import load_weights
from hybridflow.models.opt import PostNormLayer, ProjectedEmbedding
from hybridflow.models.output_layer import OutputLayer, Outputs
from hybridflow.models.routing import routing_of, take_engines_experts
from hybridflow.models.shared_prompt import AttentionKernel
from hybridflow.parallel.device import current_device, uses_cuda
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.platform import adapt_megatron

Parts = TypeVar("Parts")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class PackedModel(LanguageModule):
    """A chunk of a model that runs packed micro-batches; subclasses say what comes after the last layer.

    Of megatron's embedding and block of layers. Its GPTModel would add nothing but what is replaced here, and is
    deprecated in 0.19.2. Parameters are made in the order of the model, which is that of megatron's buffers.
    """

    def __init__(self, config: TransformerConfig, spec: ModelSpec, grid: Grid, chunk: int, *, tied: bool) -> None:
        super().__init__(config, grid.groups)
        layout = grid.layout
        self.layers = layout.chunks(spec.num_layers)[grid.pp_rank][chunk]
        # by these names megatron's schedules and its sums of tied embeddings ask a model
        self.pre_process = grid.is_first_stage and chunk == 0
        self.post_process = grid.is_last_stage and chunk == layout.vpp - 1
        self.share_embeddings_and_output_weights = tied
        self.vp_stage = chunk if layout.vpp > 1 else None  # type: ignore[assignment]  # it says None
        self.model_type = ModelType.encoder_or_decoder
        if self.pre_process:
            self.embedding = _embedding(config, spec, grid.groups.tp)
        self.decoder = TransformerBlock(
            config,
            _block_spec(spec, len(self.layers), config.params_dtype),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=grid.groups,
            vp_stage=self.vp_stage,
        )
        if self.post_process:
            self.make_head(spec)
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        self.routing_counts: Tensor | None = None  # of `models.routing.Differences`, while somebody counts
        for index, layer in enumerate(self._checked_layers()):
            if isinstance(layer.mlp, MixtureOfExperts):
                take_engines_experts(layer, index)
                layer.mlp.group, layer.mlp.router.normalize = grid.groups.tp, spec.normalize_router
        for module in self.modules():
            finish: Any = getattr(module, "finish_init", None)
            if finish is not None:  # Transformer Engine's layers: no recipe of quantization
                finish(None)
        self._position_offset, rotary = spec.traits.position_offset, spec.rotary()
        # a plain attribute: as a buffer it would be cast to the weights' dtype
        self.rotary = None if rotary is None else Rotary(rotary.frequencies.to(current_device()), rotary.factor)

    def _checked_layers(self) -> list[TransformerLayer]:
        """Those that the layout has here. Each mixes tokens by our attention, which knows where packed sequences end.

        megatron's gated delta net looks at cu_seqlens only where qkv_format is "thd"; that of PackedSequences is None.
        """
        layers = [layer for layer in self.decoder.layers if isinstance(layer, TransformerLayer)]
        numbers = tuple(layer.layer_number - 1 for layer in layers)
        assert numbers == self.layers, f"megatron placed the layers {numbers} where the layout has {self.layers}"
        mixers = {type(layer.self_attention).__name__ for layer in layers if not _knows_packing(layer.self_attention)}
        assert not mixers, f"{', '.join(mixers)}: would mix the tokens of packed sequences"
        return layers

    def set_input_tensor(self, input_tensor: list[Any]) -> None:
        """What the stage before sent; megatron's schedules call this, with one tensor."""
        [hidden] = input_tensor
        self.decoder.set_input_tensor(hidden)

    def make_head(self, spec: ModelSpec) -> None:
        """What the last stage has behind its layers."""
        raise NotImplementedError

    def forward(self, micro_batch: MicroBatch) -> Tensor | Outputs:
        routing = routing_of(micro_batch.routed_experts, micro_batch.rows, self.layers, self.routing_counts)
        embedded, packed = None, replace(micro_batch.packed, routing=routing)
        if self.pre_process:
            positions = micro_batch.positions[None] + self._position_offset  # read where they are learned
            embedded = self.embedding(input_ids=micro_batch.input_ids[None], position_ids=positions)  # (t, 1, hidden)
        if self.rotary is not None:
            angles = micro_batch.positions[:, None] * self.rotary.frequencies
            packed = packed.with_rotary(angles, self.config.params_dtype, factor=self.rotary.factor)
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=None,  # applied in our core attention
            packed_seq_params=packed,
        )
        if not self.post_process:
            return hidden
        return self.outputs(self._whole(hidden)[micro_batch.rows, 0])

    def _whole(self, hidden: Tensor) -> Tensor:
        """All tokens on every tensor-parallel rank. Each rank's gradient is complete, so it is merely split again."""
        if not self.config.sequence_parallel:
            return hidden
        whole: Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )
        return whole

    def outputs(self, hidden: Tensor) -> Tensor | Outputs:
        raise NotImplementedError


class PolicyModel(PackedModel):
    """Output: r rows of `Outputs`."""

    def __init__(self, config: TransformerConfig, spec: ModelSpec, grid: Grid, chunk: int) -> None:
        super().__init__(config, spec, grid, chunk, tied=spec.tied)

    def make_head(self, spec: ModelSpec) -> None:
        self.project_out = _projection(self.config, spec)
        self.output_layer = OutputLayer(
            spec.embedding_size,
            spec.padded_vocab_size,
            config=self.config,
            tied=self.pre_process and self.share_embeddings_and_output_weights,
            tp_group=self.pg_collection.tp,
        )

    def outputs(self, hidden: Tensor) -> Outputs:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        outputs: Outputs = self.output_layer(self.project_out(hidden), weight=weight)
        return outputs


class ValueModel(PackedModel):
    """Output: (r,) float32, computed in float32: bfloat16 would round values and scores near 1 to steps of 0.008."""

    def __init__(self, config: TransformerConfig, spec: ModelSpec, grid: Grid, chunk: int) -> None:
        super().__init__(config, spec, grid, chunk, tied=False)

    def make_head(self, spec: ModelSpec) -> None:
        self.project_out = _projection(self.config, spec)
        self.output_layer = nn.Linear(spec.embedding_size, 1, bias=False, dtype=self.config.params_dtype)
        nn.init.zeros_(self.output_layer.weight)  # a new value head starts at V = 0

    def outputs(self, hidden: Tensor) -> Tensor:
        hidden = self.project_out(hidden)
        return nn.functional.linear(hidden.float(), self.output_layer.weight.float()).squeeze(-1)


def _knows_packing(mixer: nn.Module) -> bool:
    return isinstance(mixer, GroupedSelfAttention) and isinstance(mixer.core_attention, PackedAttention)


def _embedding(config: TransformerConfig, spec: ModelSpec, tp_group: ProcessGroup) -> LanguageModelEmbedding:
    """Rotary angles are made in forward, from the packed positions."""
    made = LanguageModelEmbedding(
        config,
        spec.padded_vocab_size,
        spec.num_positions,
        position_embedding_type="learned_absolute" if spec.traits.position_offset else "none",
        tp_group=tp_group,
    )
    if spec.projected_size is not None:
        made.word_embeddings = ProjectedEmbedding(config, spec.padded_vocab_size, spec.projected_size, tp_group)
    return made


def _projection(config: TransformerConfig, spec: ModelSpec) -> nn.Module:
    """From the layers' size to that of the embedding."""
    if spec.projected_size is None:
        return nn.Identity()
    return nn.Linear(config.hidden_size, spec.projected_size, bias=False, dtype=config.params_dtype)


def build_model(
    spec: ModelSpec,
    grid: Grid,
    *,
    head: Head,
    dtype: str,
    sequence_parallel: bool,
    recompute: str,
    device: torch.device,
    head_seed: int | None = None,
) -> list[PackedModel]:
    """This rank's chunks of the model, filled from `spec.path`.

    head_seed: what a score head is drawn from that is not there; None: it starts at zero, as a critic's may.

    Errors: CheckpointError naming the file and tensor that is missing, damaged or of another shape.
    """
    config = transformer_config(spec, grid, dtype=dtype, sequence_parallel=sequence_parallel, recompute=recompute)
    adapt_megatron()
    model_class = ValueModel if head == "score" else PolicyModel
    chunks: list[PackedModel] = [
        model_class(config, spec, grid, chunk).to(device=device, dtype=DTYPES[dtype])
        for chunk in range(grid.layout.vpp)
    ]
    load_weights(chunks, spec, grid, head=head, head_seed=head_seed)
    return chunks


def transformer_config(
    spec: ModelSpec, grid: Grid, *, dtype: str, sequence_parallel: bool, recompute: str
) -> TransformerConfig:
    traits = spec.traits
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="LayerNorm" if traits.norm_eps else "RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=traits.gated,
        activation_func=nn.functional.silu if traits.gated else nn.functional.relu,
        add_bias_linear=traits.linear_bias,
        add_qkv_bias=traits.qkv_bias,
        qk_layernorm=traits.qk_norm,
        rotary_interleaved=traits.rotary_interleaved,
        **(_expert_config(spec) if spec.num_experts else {}),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.layout.vpp if grid.layout.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=grid.layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=grid.layout.last_stage_layers,
        sequence_parallel=sequence_parallel,
        params_dtype=DTYPES[dtype],
        pipeline_dtype=DTYPES[dtype],
        bf16=dtype == "bfloat16",
        perform_initialization=False,  # every weight is loaded
        use_cpu_initialization=not uses_cuda(),
        calculate_per_token_loss=True,  # losses arrive normalised: no division by micro-batches or replicas
        gradient_accumulation_fusion=uses_cuda() and _grad_accum_fusion_available,  # apex
        bias_activation_fusion=_transformer_engine() and traits.gated,
        use_te_activation_func=not _transformer_engine(),  # what megatron calls an activation that the layer spec names
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,  # what a stage has sent on it need not keep
        variable_seq_lengths=grid.pp > 1,  # micro-batches differ in length
        moe_token_dispatcher_type="alltoall" if grid.pp > 1 else "allgather",  # else it refuses varying lengths
        **RECOMPUTE[recompute],
    )


def _expert_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_moe_experts": spec.num_experts,
        "moe_router_topk": spec.experts_per_token,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": spec.ffn_hidden_size,
    }


def _transformer_engine() -> bool:
    return uses_cuda() and HAVE_TE  # megatron's word: one that cannot be imported is as good as none


@dataclass(frozen=True)
class LayerClasses:
    """What megatron's local layers are made of, beside megatron's own classes."""

    rms_norm: type[RMSNorm] = RMSNorm
    swiglu: type[SwiGLU] = SwiGLU
    self_attention: type[GroupedSelfAttention] = GroupedSelfAttention
    layer_of_rms_norms: type[TransformerLayer] = TransformerLayer


class RMSNormInC(RMSNorm):
    function = cpu_layers.RMSNormFunctionInC


class SwiGLUInC(SwiGLU):
    function = cpu_layers.SwiGLUFunctionInC


class SelfAttentionInC(cpu_layers.TurningHeads, GroupedSelfAttention):
    """Heads are turned in the memory of their projection."""


IN_C = LayerClasses(RMSNormInC, SwiGLUInC, SelfAttentionInC, cpu_layers.SummingLayer)


def layer_classes() -> LayerClasses:
    """By the device, and on a CPU by whether there are kernels in C, on which ranks have agreed."""
    return LayerClasses() if uses_cuda() or library() is None else IN_C


def attention_functions(dtype: torch.dtype, *, interleaved: bool = False) -> AttentionFunctions:
    """As `layer_classes`. interleaved: rotary embedding turns neighbouring dimensions."""
    by_torch = rotation(neighbours if interleaved else halves)
    if uses_cuda():
        return AttentionFunctions(flash_or_exact(dtype), by_torch)
    if library() is None:
        kernel = AttentionKernel(cpu_attention.flash_forward, cpu_attention.flash_backward)
        return AttentionFunctions(by_length_or_merged(kernel), by_torch)
    return AttentionFunctions(cpu_attention.attend, by_torch if interleaved else cpu_attention.rotated)


def _block_spec(spec: ModelSpec, num_layers: int, dtype: torch.dtype) -> TransformerBlockSubmodules:
    traits, classes = spec.traits, layer_classes()
    norm = LayerNorm if traits.norm_eps else classes.rms_norm
    if _transformer_engine() and not spec.post_norm:  # it has a norm in front of every linear layer
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=spec.num_experts or None, qk_layernorm=traits.qk_norm
        )
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=traits.qk_norm)
        _name_local_layers(layer, norm, classes.swiglu if traits.gated else ReLU, qk_norm=traits.qk_norm)
    parts = _submodules(layer, TransformerLayerSubmodules)
    if norm is classes.rms_norm:
        layer.module = classes.layer_of_rms_norms
    if spec.post_norm:
        layer.module, parts.input_layernorm, parts.pre_mlp_layernorm = PostNormLayer, IdentityOp, IdentityOp
    if spec.num_experts:
        parts.mlp = ModuleSpec(MixtureOfExperts, params={"swiglu": classes.swiglu.function})
    assert isinstance(parts.self_attention, ModuleSpec)
    parts.self_attention.module = classes.self_attention
    functions = attention_functions(dtype, interleaved=traits.rotary_interleaved)
    core = ModuleSpec(PackedAttention, params={"functions": functions})
    _submodules(parts.self_attention, SelfAttentionSubmodules).core_attention = core
    final = None if spec.post_norm else ModuleSpec(norm)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=final)


def _name_local_layers(layer: ModuleSpec, norm: type[nn.Module], activation: type[nn.Module], *, qk_norm: bool) -> None:
    parts = _submodules(layer, TransformerLayerSubmodules)
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    _submodules(parts.mlp, MLPSubmodules).activation_func = activation
    if qk_norm:
        attention = _submodules(parts.self_attention, SelfAttentionSubmodules)
        attention.q_layernorm = attention.k_layernorm = norm


def _submodules(spec: object, kind: type[Parts]) -> Parts:
    """Those of a module, which megatron declares as any object. 0.19.2 gives a function that makes an MLP of them."""
    found = spec.keywords.get("submodules") if isinstance(spec, partial) else getattr(spec, "submodules", None)
    assert isinstance(found, kind), f"{spec} has no {kind.__name__}"
    return found
