"""Whether so many ranks can share a model. Pure.

    check_parallel(read_spec(path), "actor.tensor_parallel_size", 3)      errors: ConfigError with the sizes that fit

`_why_*`: the end of a sentence that begins with `key = size`, or None where the ranks can.
"""

from collections.abc import Callable

from hybridflow.architecture.spec import ModelSpec
from hybridflow.errors import ConfigError, remedy

EXPERT_MULTIPLE = 8  # rows of 16 bytes in half precision
WhyNot = Callable[[ModelSpec, int], str | None]


def check_parallel(spec: ModelSpec, key: str, tp: int) -> None:
    """Raise ConfigError, naming `key` and the sizes below that fit, unless `tp` ranks can share this model."""
    _check_size(spec, key, tp, _why_not_shared, key)


def check_experts(spec: ModelSpec, key: str, ep: int, setting: str = "") -> None:
    """Raise ConfigError, naming `key`, unless `ep` ranks can have as many whole experts each.

    setting: the key to set, where `key` is more than its name.
    """
    _check_size(spec, key, ep, _why_no_whole_experts, setting or key)


def check_expert_shares(spec: ModelSpec, key: str, tp: int, *, setting: str = "", times: int = 1) -> None:
    """Raise ConfigError, naming `key`, unless `tp` ranks can share each expert.

    setting: the key to set, where `key` is more than its name; its value is `times` the ranks.
    """
    _check_size(spec, key, tp, _why_no_shares, setting or key, times=times)


def _check_size(spec: ModelSpec, key: str, size: int, why: WhyNot, setting: str, *, times: int = 1) -> None:
    if (reason := why(spec, size)) is not None:
        fewer = [times * each for each in range(1, size) if why(spec, each) is None]
        raise ConfigError(f"{key} = {size}{reason}{remedy({setting: fewer})}")


def _why_not_shared(spec: ModelSpec, tp: int) -> str | None:
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


def _why_no_whole_experts(spec: ModelSpec, ep: int) -> str | None:
    """Of `ep` ranks with as many whole experts each."""
    if ep > 1 and not spec.num_experts:
        return f": {spec.path} has no experts"
    count = spec.num_experts
    return _no_divisor(spec, ep, f"the number of experts = {count}", count) if count % ep else None


def _why_no_shares(spec: ModelSpec, tp: int) -> str | None:
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


def _no_divisor(spec: ModelSpec, parts: int, what: str, count: int) -> str:
    return f" does not divide {what} of {spec.path}: {count} = {count // parts} x {parts} + {count % parts}"
