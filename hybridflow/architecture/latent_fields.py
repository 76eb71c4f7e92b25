"""What config.json says of latent attention (MLA) and of experts in groups, checked.

`ConfigFields` asks for it; vLLM and exported models are told what transformers leaves out of a config.json.
"""

from collections.abc import Callable
from typing import Any

from hybridflow.architecture.family import Family
from hybridflow.architecture.layer_kinds import LatentSizes
from hybridflow.architecture.rope import Refuse, is_number
from hybridflow.formats.block_fp8 import BLOCK

Size = Callable[[str], int]  # a positive whole number of config.json
BEST_OF_GROUP = 2  # experts whose scores are a group's


def read_latent(raw: dict[str, Any], family: Family, size: Size, refuse: Refuse) -> dict[str, Any]:
    """Fields of `ModelSpec` of a model whose layers are all of latent attention."""
    heads, num_layers = size("num_attention_heads"), size("num_hidden_layers")
    kv_heads = raw.get("num_key_value_heads", family.default("num_key_value_heads"))
    refuse("num_key_value_heads", kv_heads, kv_heads not in (heads, None), f"must be {heads}: each head has its own")
    refuse("q_lora_rank", None, "q_lora_rank" not in raw, "must be there, null where queries are not narrow")
    sizes = LatentSizes(
        query_rank=None if raw.get("q_lora_rank") is None else size("q_lora_rank"),
        key_rank=size("kv_lora_rank"),
        plain_dim=size("qk_nope_head_dim"),
        rotary_dim=size("qk_rope_head_dim"),
        value_dim=size("v_head_dim"),
    )
    wide = sizes.value_dim > sizes.head_dim
    refuse("v_head_dim", sizes.value_dim, wide, f"must be at most {sizes.head_dim}, the size of queries and keys")
    refuse("qk_rope_head_dim", sizes.rotary_dim, sizes.rotary_dim % 2 > 0, "must be even")
    return {
        "latent": sizes,
        "mixers": ("latent",) * num_layers,
        "head_dim": sizes.head_dim,
        "rotary_dim": sizes.rotary_dim,
    }


def check_rope(rope: dict[str, Any], refuse: Refuse) -> None:
    """Refuse what transformers and vLLM make different angles of in these families. rope: as `read_rope` gives it."""
    kind = rope["rope_type"]
    refuse("rope_type", kind, kind not in ("default", "yarn"), "known are default, yarn in this family")
    factor = rope.get("attention_factor")
    refuse("attention_factor of rope_type yarn", factor, factor is not None, "vLLM takes it for another kind here")
    scale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    alone = (scale is None) != (all_dim is None)
    refuse("mscale of rope_type yarn", scale, alone, "must come with mscale_all_dim, or neither: vLLM reads both")
    refuse("truncate of rope_type yarn", False, rope.get("truncate") is False, "vLLM always rounds in this family")


def read_groups(groups: Any, of_token: Any, num_experts: int, chosen: int, refuse: Refuse) -> tuple[int, int]:
    """How many groups the experts are in, and how many of these a token's experts may be of."""
    whole = is_number(groups) and groups == int(groups) and groups > 0 and num_experts % groups == 0
    refuse("n_group", groups, not whole, f"must divide {num_experts} experts")
    few = is_number(of_token) and of_token == int(of_token) and 0 < of_token <= groups
    refuse("topk_group", of_token, not few, f"must be a whole number from 1 to {groups} groups")
    each = num_experts // int(groups)
    small = f"groups of {each} experts: a group's score is that of the best {BEST_OF_GROUP}"
    refuse("n_group", groups, groups > 1 and each < BEST_OF_GROUP, small)
    refuse("topk_group", of_token, of_token * each < chosen, f"{of_token} x {each} experts, a token has {chosen}")
    return int(groups), int(of_token)


def dense_layers(raw: dict[str, Any], family: Family, key: str, refuse: Refuse) -> Any:
    """How many of the first layers have no experts, by the family's key or, as transformers 5 has it, by layer."""
    kinds = raw.get("mlp_layer_types") if family.mixer == "latent" else None
    missing = family.default(key)
    if kinds is not None:
        refuse("mlp_layer_types", kinds, not isinstance(kinds, list), "must be a list")
        first = [kind == "dense" for kind in kinds].index(False) if "sparse" in kinds else len(kinds)
        ordered = list(kinds) == ["dense"] * first + ["sparse"] * (len(kinds) - first)
        refuse("mlp_layer_types", kinds, not ordered, "dense layers among layers of experts are not supported")
        missing = first
    count = raw.get(key, missing)
    differs = kinds is not None and count != missing
    refuse(key, count, differs, f"mlp_layer_types has {missing} dense layers")
    return count


def is_block_fp8(raw: dict[str, Any], family: Family) -> bool:
    """Whether the weights are fp8 with a scale a block, as DeepSeek-V3's are, in a family that is read so."""
    found = raw.get("quantization_config")
    return (
        family.block_fp8
        and isinstance(found, dict)
        and found.get("quant_method") == "fp8"
        and found.get("weight_block_size") == [BLOCK, BLOCK]
    )


def told_to_engines(family: Family, num_dense_layers: int) -> dict[str, Any]:
    """Fields that vLLM 0.32.0 reads and transformers 5 does not write, of these families."""
    if family.mixer != "latent" or family.experts is None:
        return {}
    return {
        "topk_method": "noaux_tc",  # else vLLM's router has no bias
        "scoring_func": "sigmoid",  # else it is a softmax
        family.experts.dense_layers_key: num_dense_layers,
    }
