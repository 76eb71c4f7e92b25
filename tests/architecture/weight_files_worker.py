"""megatron's own dist_checkpointing against ours: plain GPTModels at tp 2, pp 2 load what we wrote and save it again.

torchrun --nproc-per-node 4 -m tests.architecture.weight_files_worker ROOT

ROOT/NAME/policy is a HuggingFace directory, ROOT/NAME/ours our torch_dist form of it. Written: ROOT/NAME/rank_N.pt (the
parameters of each rank as loaded), ROOT/NAME/stacked and single (saved by megatron; in `single` each layer has tensors
of its own), and by two ranks and by four, each with a share of the chunks, ROOT/two and ROOT/four.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weight_files import write_distributed
from hybridflow.errors import CheckpointError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout
from tests.architecture.whole_weights import SHARES, chunk_of, share_chunks

NUM_RANKS = 4
USES_CUDA = (filesystem_async, state_dict_saver, torch_strategy)  # loaded before megatron is adapted to the CPU
MODELS = {  # name: family, tied, key/value heads
    "llama": ("llama", False, 4),
    "qwen2": ("qwen2", True, 2),
    "mixtral": ("mixtral", False, 4),
}


def plain_model(spec: ModelSpec, grid: Grid) -> GPTModel:
    """As a user of megatron-core builds it: its local layers, nothing of ours."""
    experts = spec.num_experts or None
    moe = (
        {"num_moe_experts": experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"} if experts else {}
    )
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.family == "qwen2",
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **moe,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm"),
        spec.padded_vocab_size,
        spec.max_positions,
        pre_process=grid.is_first_stage,
        post_process=grid.is_last_stage,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        pg_collection=grid.groups,
    )
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def beside(weights: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a training checkpoint holds beside the weights."""
    moments = {
        f"moment {name}": dataclasses.replace(x, key=f"optimizer.state.exp_avg.{x.key}")
        for name, x in weights.items()
        if isinstance(x, ShardedTensor)
    }
    return {**moments, "rng": ShardedObject("rng_state", {"rank": rank}, (NUM_RANKS,), (rank,)), "iteration": 7}


def name_like_transformer_engine(weights: dict[str, Any]) -> None:
    """Its layers call the norm before a router by its own name, megatron's local layers by that of linear_fc1."""
    for tensor in weights.values():
        tensor.key = tensor.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def run_megatron(directory: Path, grid: Grid) -> None:
    model = plain_model(read_spec(directory / "policy"), grid)
    dp_cp = {"dp_cp_group": grid.groups.dp_cp}
    weights = model.sharded_state_dict(metadata=dp_cp)
    if model.config.num_moe_experts:
        name_like_transformer_engine(weights)
    model.load_state_dict(dist_checkpointing.load(weights, str(directory / "ours")))
    torch.save(dict(model.named_parameters()), directory / f"rank_{dist.get_rank()}.pt")
    for name, metadata in (("stacked", dp_cp), ("single", dp_cp | {"non_homogeneous_layers": True})):
        if dist.get_rank() == 0:
            (directory / name).mkdir()
        dist.barrier()
        weights = model.sharded_state_dict(metadata=metadata)
        dist_checkpointing.save({**weights, **beside(weights, dist.get_rank())}, str(directory / name))


def write_in_shares(root: Path) -> None:
    """The same chunks, written by two ranks and by four; then one whose chunk cannot be read."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    for name, group, num_ranks in (("two", pair, 2), ("four", dist.group.WORLD, NUM_RANKS)):
        if rank < num_ranks:
            write_distributed(root / name, share_chunks(rank, num_ranks), group=group)

    def unreadable() -> torch.Tensor:
        raise CheckpointError(f"rank {rank} cannot read this")

    chunks = [chunk_of("x", (rank,), SHARES["vector"][rank : rank + 1], (NUM_RANKS,))]
    if rank == 2:
        chunks = [dataclasses.replace(chunks[0], read=unreadable)]
    try:
        write_distributed(root / "broken", chunks, group=dist.group.WORLD)
        message = "no error"
    except CheckpointError as error:
        message = str(error)
    (root / f"error_{rank}").write_text(message)


def main(root: Path) -> None:
    platforms.start(seed=0)
    platforms.adapt_megatron()
    grid = Grid.build(Layout(2, 2, 1, tuple(range(NUM_RANKS))), ProcessGroups())
    parallel_state.destroy_global_memory_buffer()
    parallel_state.initialize_model_parallel(2, 2)  # the sharded state of tied embeddings reads it
    for name in MODELS:
        run_megatron(root / name, grid)
    write_in_shares(root)
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
