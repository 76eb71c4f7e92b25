"""Build a megatron-core model on a grid and fill it from a HuggingFace directory or a torch_dist checkpoint.

Every rank reads only the slices it holds: those of one tensor-parallel rank and one pipeline stage, in one model chunk
or, with virtual pipeline parallelism, several. The last stage of a policy model returns what makes this rank's columns
of the logits, that of a value model one scalar, both only for the rows that the micro-batch wants.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import VocabParallelEmbedding, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import not_none
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridflow.architecture.rope import Rotary
from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.config.recompute import Recompute
from hybridflow.models.attention import (
    GroupedSelfAttention,
    PackedAttention,
)
from hybridflow.models.expert_dispatch import TokenDispatcher
from hybridflow.models.experts import ExpertGroups, MixtureOfExperts
from hybridflow.models.layer_classes import DispatcherName, output_layer_config
from hybridflow.models.layer_specs import DTYPES, ProjectedEmbedding, block_spec, transformer_config
from hybridflow.models.layers import KeepsFloat32, mark
from hybridflow.models.lora import AdapterChoice, add_adapters
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.models.mixer import Mixer
from hybridflow.models.named_weights import load_weights
from hybridflow.models.output_layer import OutputLayer, Outputs
from hybridflow.models.recomputation import compute_again, needs_gradients_of_inputs, runs_again
from hybridflow.models.routing import RoutingCounts, follow_routing, routing_of
from hybridflow.models.token_dispatchers import token_dispatcher
from hybridflow.parallel.device import current_device
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.platform import adapt_megatron


class PackedModel(LanguageModule):
    """A chunk of a model that runs packed micro-batches; subclasses say what comes after the last layer.

    Of megatron's embedding and block of layers. megatron's GPTModel would add nothing but what is replaced here, and is
    deprecated in 0.19.2. Parameters are made in the order of the model, which is that of megatron's buffers.
    """

    def __init__(self, config: TransformerConfig, spec: ModelSpec, grid: Grid, chunk: int, *, tied: bool) -> None:
        super().__init__(config, grid.groups)
        layout = grid.layout
        self.layers = layout.chunks(spec.num_layers)[grid.pp_rank][chunk]
        # megatron's schedules and sums of tied embeddings ask a model by these names
        self.pre_process = grid.is_first_stage and chunk == 0
        self.post_process = grid.is_last_stage and chunk == layout.vpp - 1
        self.share_embeddings_and_output_weights = tied
        self.vp_stage = chunk if layout.vpp > 1 else None  # type: ignore[assignment]  # it says None
        self.model_type = ModelType.encoder_or_decoder
        if self.pre_process:
            self.embedding = _embedding(config, spec, grid.groups.tp)
        self.decoder = TransformerBlock(
            config,
            block_spec(spec, self.layers, config, grid.place("experts")),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=grid.groups,
            vp_stage=self.vp_stage,
        )
        if self.post_process:
            self.make_head(spec)
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        self.adapters: AdapterChoice | None = None  # `build_model` adds them
        self.routing_counts: RoutingCounts | None = None  # while somebody counts
        for index, layer in enumerate(self._checked_layers()):
            layer.recompute_mlp = False
            if not isinstance(layer.mlp, MixtureOfExperts):
                if runs_again(config, "mlp"):
                    compute_again(layer.mlp)
            else:
                follow_routing(layer, index)
                layer.mlp.group, layer.mlp.router.normalize = grid.groups.tp, spec.router.normalizes
                layer.mlp.router.scaling = spec.router.scaling
                layer.mlp.router.groups = ExpertGroups(spec.router.groups, spec.router.chosen_groups)
                if layout.dense_per_expert_copy > 1:
                    _share_experts(layer.mlp, config)
        for module in self.modules():
            finish: Any = getattr(module, "finish_init", None)
            if finish is not None:  # Transformer Engine's layers: no recipe of quantization
                finish(None)
        self._position_offset, self._query_growth = spec.traits.embedding.position_offset, spec.query_growth
        # plain attributes: as buffers they would be cast to the weights' dtype
        self.rotary, self.window_rotary = _on_device(spec.rotary()), _on_device(spec.window_rotary())

    def _set_attention_backend(self) -> None:
        """Not by megatron, which would set variables of Transformer Engine's attention for the whole process."""

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

    def set_dispatcher(self, dispatcher: TokenDispatcher) -> None:
        """The way of tokens to their experts, the same in all layers."""
        for layer in self._checked_layers():
            if isinstance(layer.mlp, MixtureOfExperts):
                layer.mlp.dispatcher = dispatcher

    def add_adapters(self, spec: ModelSpec, grid: Grid) -> None:
        """Freeze the model but for a value head, and add the adapters of `spec`."""
        self.adapters = add_adapters(self, self._checked_layers(), spec, grid)

    def set_input_tensor(self, input_tensor: list[Any]) -> None:
        """What the stage before sent; megatron's schedules call this, with one tensor."""
        [hidden] = input_tensor
        self.decoder.set_input_tensor(hidden)

    def make_head(self, spec: ModelSpec) -> None:
        """What the last stage has behind the layers."""
        raise NotImplementedError

    def forward(self, micro_batch: MicroBatch) -> Tensor | Outputs:
        counts, rows_per_token = self.routing_counts, micro_batch.rows_per_token
        routing = routing_of(micro_batch.routed, micro_batch.rows, self.layers, counts, rows_per_token)
        embedded, packed = None, replace(micro_batch.packed, routing=routing)
        if self.pre_process:
            positions = micro_batch.positions[None] + self._position_offset  # read where they are learned
            embedded = self.embedding(input_ids=micro_batch.input_ids[None], position_ids=positions)  # (t, 1, hidden)
            if self.adapters is not None and needs_gradients_of_inputs(self.config):
                embedded.requires_grad_()
        if self.rotary is not None:
            angles = micro_batch.positions[:, None] * self.rotary.frequencies
            packed = packed.with_rotary(angles, self.config.params_dtype, factor=self.rotary.factor)
        if self.window_rotary is not None:
            angles = micro_batch.positions[:, None] * self.window_rotary.frequencies
            packed = packed.with_window_rotary(angles, self.config.params_dtype, factor=self.window_rotary.factor)
        if self._query_growth is not None:
            packed = packed.with_growth(micro_batch.positions, self.config.params_dtype, self._query_growth)
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
            config=output_layer_config(self.config),
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

    def add_adapters(self, spec: ModelSpec, grid: Grid) -> None:
        super().add_adapters(spec, grid)
        if self.post_process:
            self.output_layer.requires_grad_(True)

    def outputs(self, hidden: Tensor) -> Tensor:
        hidden = self.project_out(hidden)
        return nn.functional.linear(hidden.float(), self.output_layer.weight.float()).squeeze(-1)


def _float32_kept(chunk: PackedModel) -> PackedModel:
    """With what is float32 in any model in float32 again."""
    for module in chunk.modules():
        if isinstance(module, KeepsFloat32):
            module.keep_float32()
    return chunk


def _share_experts(mixture: MixtureOfExperts, config: TransformerConfig) -> None:
    """With other replicas: each rank routes own tokens, and gradients are summed over copies of the experts."""
    mark(mixture.router.weight, sequence_parallel=config.sequence_parallel)
    for parameter in mixture.experts.parameters():
        mark(parameter, allreduce=False)


def _on_device(rotary: Rotary | None) -> Rotary | None:
    return None if rotary is None else Rotary(rotary.frequencies.to(current_device()), rotary.factor)


def _knows_packing(mixer: nn.Module) -> bool:
    if isinstance(mixer, Mixer):
        return True
    return isinstance(mixer, GroupedSelfAttention) and isinstance(mixer.core_attention, PackedAttention)


def _embedding(config: TransformerConfig, spec: ModelSpec, tp_group: ProcessGroup) -> LanguageModelEmbedding:
    """Rotary angles are made in forward, from the packed positions."""
    made = LanguageModelEmbedding(
        config,
        spec.padded_vocab_size,
        spec.num_positions,
        position_embedding_type="learned_absolute" if spec.traits.embedding.position_offset else "none",
        tp_group=tp_group,
    )
    if spec.traits.embedding.scaled:
        made.word_embeddings = ScaledEmbedding(
            config, spec.padded_vocab_size, tp_group, scatters=made.reduce_scatter_embeddings
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
    recompute: Recompute,
    device: torch.device,
    head_seed: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    dispatcher: DispatcherName = "auto",
) -> list[PackedModel]:
    """This rank's chunks of the model, filled from `spec.path`. Of a mixture, collective: see `token_dispatcher`.

    arguments: as `transformer_config` takes them. head_seed: what a score head is drawn from that is not there; None:
    the head starts at zero, as a critic's may. dispatcher: of tokens to experts.

    Errors: those of `token_dispatcher`; CheckpointError naming the file and tensor that is missing, damaged or of
    another shape.
    """
    config = transformer_config(
        spec, grid, dtype=dtype, sequence_parallel=sequence_parallel, recompute=recompute, arguments=arguments
    )
    adapt_megatron()
    model_class = ValueModel if head == "score" else PolicyModel
    way = token_dispatcher(config, grid, dispatcher) if spec.num_experts else None
    chunks = []
    for number in range(grid.layout.vpp):
        chunk: PackedModel = model_class(config, spec, grid, number)
        if spec.lora is not None:
            chunk.add_adapters(spec, grid)
        if way is not None:
            chunk.set_dispatcher(way)
        chunks.append(_float32_kept(chunk.to(device=device, dtype=DTYPES[dtype])))
    load_weights(chunks, spec, grid, head=head, head_seed=head_seed)
    return chunks


class ScaledEmbedding(VocabParallelEmbedding):
    """sqrt(hidden_size) E[token], the root rounded to the weights' dtype. The output layer reads E itself."""

    def __init__(self, config: TransformerConfig, vocab_size: int, tp_group: ProcessGroup, *, scatters: bool) -> None:
        """scatters: to the tokens of each rank, as megatron has it with sequence parallelism."""
        super().__init__(
            vocab_size,
            config.hidden_size,
            init_method=not_none(config.embedding_init_method),
            reduce_scatter_embeddings=scatters,
            config=config,
            tp_group=tp_group,
        )
        self.scale = float(torch.tensor(config.hidden_size**0.5, dtype=config.params_dtype))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = super().forward(input_ids) * self.scale
        return hidden
