"""Whole megatron parameters from HuggingFace tensors, written out by hand, and chunks to write."""

from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridflow.architecture.spec import ModelSpec
from hybridflow.formats.distributed_storage import Chunk

SHARES = {
    "matrix": torch.randn(8, 6, generator=torch.Generator().manual_seed(0)),
    "vector": torch.randn(16, generator=torch.Generator().manual_seed(1)).bfloat16(),
}


def chunk_of(key: str, offset: tuple[int, ...], tensor: Tensor, whole: tuple[int, ...]) -> Chunk:
    return Chunk(key, offset, tuple(tensor.shape), whole, tensor.dtype, lambda: tensor)


def share_chunks(rank: int, num_ranks: int) -> list[Chunk]:
    """Rows of SHARES, in eight chunks a tensor dealt out to the ranks."""
    chunks = []
    for key, tensor in SHARES.items():
        rows = len(tensor) // 8
        pieces = [
            chunk_of(key, (i * rows, 0)[: tensor.dim()], tensor[i * rows :][:rows], tensor.shape) for i in range(8)
        ]
        chunks += pieces[rank::num_ranks]
    return chunks


def whole_weights(source: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Key of a torch_dist checkpoint -> tensor, of a llama, qwen2 or mixtral."""

    def layers(make: Callable[[str], Tensor]) -> Tensor:
        return torch.stack([make(f"model.layers.{i}.") for i in range(spec.num_layers)])

    def qkv(kind: str) -> Tensor:
        def of_layer(at: str) -> Tensor:
            q, k, v = (source[f"{at}self_attn.{x}_proj.{kind}"].unflatten(0, (spec.num_kv_heads, -1)) for x in "qkv")
            return torch.cat([torch.cat([q[g], k[g], v[g]]) for g in range(spec.num_kv_heads)])

        return layers(of_layer)

    def experts(*names: str) -> Tensor:
        def of_layer(at: str) -> Tensor:
            at += "block_sparse_moe.experts."
            return torch.stack(
                [torch.cat([source[f"{at}{i}.{name}.weight"] for name in names]) for i in range(spec.num_experts)]
            )

        return layers(of_layer)

    prefix = "decoder.layers."
    whole = {
        "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": source["model.norm.weight"],
        prefix + "self_attention.linear_qkv.layer_norm_weight": layers(
            lambda at: source[at + "input_layernorm.weight"]
        ),
        prefix + "self_attention.linear_qkv.weight": qkv("weight"),
        prefix + "self_attention.linear_proj.weight": layers(lambda at: source[at + "self_attn.o_proj.weight"]),
    }
    norm = layers(lambda at: source[at + "post_attention_layernorm.weight"])
    if "model.layers.0.self_attn.q_proj.bias" in source:
        whole[prefix + "self_attention.linear_qkv.bias"] = qkv("bias")
    if not spec.tied:
        whole["output_layer.weight"] = source["lm_head.weight"]
    if spec.num_experts:
        whole[prefix + "pre_mlp_layernorm.weight"] = norm
        whole[prefix + "mlp.router.weight"] = layers(lambda at: source[at + "block_sparse_moe.gate.weight"])
        whole[prefix + "mlp.experts.experts.linear_fc1.weight"] = experts("w1", "w3")
        whole[prefix + "mlp.experts.experts.linear_fc2.weight"] = experts("w2")
    else:
        whole[prefix + "mlp.linear_fc1.layer_norm_weight"] = norm
        whole[prefix + "mlp.linear_fc1.weight"] = layers(
            lambda at: torch.cat([source[at + "mlp.gate_proj.weight"], source[at + "mlp.up_proj.weight"]])
        )
        whole[prefix + "mlp.linear_fc2.weight"] = layers(lambda at: source[at + "mlp.down_proj.weight"])
    return whole


def layer_chunks(whole: dict[str, Tensor]) -> list[Chunk]:
    """One chunk a layer, as conversion writes them; tensors outside the layers in halves."""
    chunks = []
    for key, tensor in whole.items():
        step = 1 if key.startswith("decoder.layers.") else max(len(tensor) // 2, 1)
        for start in range(0, len(tensor), step):
            offset = (start, *(0,) * (tensor.dim() - 1))
            chunks.append(chunk_of(key, offset, tensor[start : start + step], tuple(tensor.shape)))
    return chunks


def source_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    return load_file(spec.path / "model.safetensors")
