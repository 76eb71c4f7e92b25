"""Why so many ranks cannot share a model: what `ModelSpec.check_parallel` and the others like it say. Pure.

Each function gives the end of a sentence that begins with `key = size`, or None where the ranks can.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.architecture.spec import ModelSpec

EXPERT_MULTIPLE = 8  # rows of 16 bytes in half precision
WhyNot = Callable[["ModelSpec", int], str | None]


def why_not_shared(spec: "ModelSpec", tp: int) -> str | None:
    """Of `tp` tensor-parallel ranks."""
    sizes = {"num_attention_heads": spec.num_heads}
    if not spec.num_experts:
        sizes[spec.traits.mlp.size_key] = spec.ffn_hidden_size
    if spec.num_dense_layers:
        sizes["intermediate_size"] = spec.dense_ffn_hidden_size
    sizes |= {"the size of shared experts": spec.shared_ffn_hidden_size, "padded vocab_size": spec.padded_vocab_size}
    for what, count in sizes.items():
        if count % tp:
            return _no_divisor(spec, tp, f"{what} = {count}", count)
    few, many = sorted((spec.num_kv_heads, tp))
    if many % few:
        return (
            f" must divide num_key_value_heads = {spec.num_kv_heads} of {spec.path} or be a multiple of that number: "
            f"{many} = {many // few} x {few} + {many % few}"
        )
    if spec.traits.attention.norms == "all" and tp > spec.num_kv_heads:
        return (
            f" exceeds num_key_value_heads = {spec.num_kv_heads} of {spec.path}, whose keys have one norm over all "
            "heads"
        )
    if spec.delta is not None and spec.delta.key_heads % tp:
        return _no_divisor(spec, tp, f"linear_num_key_heads = {spec.delta.key_heads}", spec.delta.key_heads)
    rows = (spec.num_query_blocks + 2 * spec.num_kv_heads) * spec.head_dim  # ranks may share a key/value group
    return _no_divisor(spec, tp, f"the {rows} rows of queries, keys and values", rows) if rows % tp else None


def why_no_whole_experts(spec: "ModelSpec", ep: int) -> str | None:
    """Of `ep` ranks with as many whole experts each."""
    if ep > 1 and not spec.num_experts:
        return f": {spec.path} has no experts"
    count = spec.num_experts
    return _no_divisor(spec, ep, f"the number of experts = {count}", count) if count % ep else None


def why_no_shares(spec: "ModelSpec", tp: int) -> str | None:
    """Of `tp` ranks that share each expert."""
    if not spec.num_experts:
        return None
    key, size = spec.traits.mlp.size_key, spec.ffn_hidden_size
    if size % tp:
        return _no_divisor(spec, tp, f"{key} = {size}", size)
    for what, count in ((key, size // tp), ("hidden_size", spec.hidden_size)):
        if count % EXPERT_MULTIPLE:
            return (
                f" leaves each expert {count} of {what} of {spec.path}, no multiple of {EXPERT_MULTIPLE}, as torch's "
                "grouped product needs it"
            )
    return None


def _no_divisor(spec: "ModelSpec", parts: int, what: str, count: int) -> str:
    return f" does not divide {what} of {spec.path}: {count} = {count // parts} x {parts} + {count % parts}"
