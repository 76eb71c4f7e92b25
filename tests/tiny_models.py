"""Small random checkpoints in HuggingFace format, and a character tokenizer, made from a seed."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.window_models import WINDOW_FAMILIES

CHARACTERS = "0123456789+-=* "
VOCAB_SIZE = 100  # no multiple of 64: the padding rows must not matter
LLAMA_SIZES = {"intermediate_size": 96}
OPT = {"ffn_dim": 96, "dropout": 0.1, "attention_dropout": 0.1}  # a trainer of rewards leaves both out
# family -> HuggingFace's prefix, and what its config needs beside the common sizes
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "glm": ("Glm", {}),
    "opt": ("OPT", OPT),
    "opt_350m": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24}),  # as the published one
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "attention_bias": True, "use_qk_norm": True},
        },
    ),
}
FAMILIES |= {
    "qwen3_5": (
        "Qwen3_5",
        {
            "full_attention_interval": 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
}
FAMILIES |= WINDOW_FAMILIES
# vLLM's latent attention on CPUs knows vectors of 512 + 64 numbers alone
LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 512, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 12},
    **{"num_key_value_heads": 8, "head_dim": 64, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "routed_scaling_factor": 1.8},
    "num_nextn_predict_layers": 0,
}
ROPE_DEEPSEEK = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0},
}
FAMILIES |= {
    "glm4_moe_lite": ("Glm4MoeLite", LATENT),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": ROPE_DEEPSEEK}),
    # as Moonlight: queries of the hidden state itself, one group, plain angles
    "moonlight": ("DeepseekV3", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}
FAMILIES["qwen3_5_moe"] = (
    "Qwen3_5Moe",
    {
        **FAMILIES["qwen3_5"][1],
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "shared_expert_intermediate_size": 48,
    },
)
ZERO_CENTERED = ("Qwen3_5", "Gemma3")  # beginnings of names of classes in transformers
TEXT = {
    "Qwen3_5": "Qwen3_5Text",
    "Qwen3_5Moe": "Qwen3_5MoeText",
    "Gemma3": "Gemma3Text",
}  # prefixes that transformers has for configs, and for models that score
SCORES = {
    "glm4_moe": "mixtral",
    "glm4_moe_lite": "mixtral",
    "qwen3_5_moe": "mixtral",
}  # of which transformers has no model that scores: another one does


ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # some frequencies are kept, some blended, some divided
}
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
ROPE_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}
    vocabulary |= {character: len(vocabulary) + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make_checkpoints(
    directory: Path,
    *,
    family: str,
    tied: bool,
    head_dim: int = 8,
    num_layers: int = 2,
    num_kv_heads: int = 4,
    max_length: int = 128,
    std: float = 0.15,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
) -> Path:
    """DIRECTORY/{policy,reference,reward,critic}: the same architecture, other weights. Biases and norms are random.

    changes: to the config, by its own names.
    """
    for number, name in enumerate(("policy", "reference", "reward", "critic")):
        prefix, extra = FAMILIES[family if number < 2 else SCORES.get(family, family)]
        torch.manual_seed(100 * seed + number)
        text = TEXT.get(prefix, prefix)
        config = getattr(transformers, text + "Config")(
            **{
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 8 * head_dim,
                **({"word_embed_proj_dim": 8 * head_dim} if prefix == "OPT" else LLAMA_SIZES),
                **({} if prefix == "OPT" else {"num_key_value_heads": num_kv_heads, "head_dim": head_dim}),
                "num_hidden_layers": num_layers,
                "num_attention_heads": 8,
                "max_position_embeddings": max_length,
                "tie_word_embeddings": tied and number < 2,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 3,
                "num_labels": 1,
                **extra,
                **(changes or {}),
            }
        )
        name_of_class = prefix + "ForCausalLM" if number < 2 else text + "ForSequenceClassification"
        model = getattr(transformers, name_of_class)(config)
        randomise(model, std)
        model.save_pretrained(directory / name)
        make_tokenizer().save_pretrained(directory / name)
    return directory


def make_wrapper(
    directory: Path, *, experts: bool = False, tied: bool = False, num_layers: int = 2, head_dim: int = 8
) -> Path:
    """DIRECTORY: a published kind of Qwen3.5, whose language model lies beside what reads images and guesses tokens.

    One layer that guesses tokens, as published ones have: transformers does not load it.
    """
    prefix, extra = FAMILIES["qwen3_5_moe" if experts else "qwen3_5"]
    torch.manual_seed(11)
    text = {
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 8 * head_dim,
            "intermediate_size": 96,
            "num_hidden_layers": num_layers,
        },
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": head_dim, "max_position_embeddings": 128},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "mtp_num_hidden_layers": 1},
        **extra,
        "tie_word_embeddings": tied,
    }
    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 8 * head_dim}
    vision = {**sizes, "num_position_embeddings": 16, "patch_size": 4, "spatial_merge_size": 2}
    config = getattr(transformers, prefix + "Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, architectures=None
    )
    model = getattr(transformers, prefix + "ForConditionalGeneration")(config)
    randomise(model, 0.15)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    file = directory / "model.safetensors"
    guessing = {"mtp.fc.weight": torch.randn(8 * head_dim, 16 * head_dim), "mtp.norm.weight": torch.randn(8 * head_dim)}
    save_file(load_file(file) | guessing, file, metadata={"format": "pt"})
    return directory


def give_own_head(directory: Path) -> Tensor:
    """Put an output layer of its own beside the embedding of a tied model, whose config.json goes on to say tied."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
    head = torch.randn(VOCAB_SIZE, tensors["model.norm.weight"].shape[0], generator=torch.Generator().manual_seed(7))
    save_file(tensors | {"lm_head.weight": 0.15 * head}, file, metadata={"format": "pt"})
    return 0.15 * head


def randomise(model: torch.nn.Module, std: float) -> None:
    """Norms that multiply by 1 + weight have weights about 0, others about 1."""
    around_zero = type(model).__name__.startswith(ZERO_CENTERED)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            is_zero = name.endswith(("bias", "A_log")) or (around_zero and "norm" in name and "linear_attn" not in name)
            torch.nn.init.normal_(parameter, mean=0.0 if is_zero else 1.0, std=0.1)
        else:  # a convolution is as large as published ones
            torch.nn.init.normal_(parameter, std=0.5 if "conv1d" in name else std)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)


# where checkpoints have the experts that transformers' models hold in one tensor: the mixture, [gate; up], down
EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3"), "w2"),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj"), "down_proj"),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3"), ("mlp", ("gate_proj", "up_proj"), "down_proj")),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), ("mlp", ("gate_proj", "up_proj"), "down_proj")),
}


def by_checkpoint_name(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Tensors by their names in transformers' model -> by those in its checkpoints, where every expert has its own."""
    if family not in EXPERTS:
        return dict(tensors)
    mixture, (gate, up), down = EXPERTS[family]
    found = {}
    for name, x in tensors.items():
        name = name.replace(".mlp.", f".{mixture}.")
        prefix, _, matrix = name.rpartition(".")
        for expert, its in enumerate(x) if matrix in ("gate_up_proj", "down_proj") and x.dim() == 3 else ():
            if matrix == "down_proj":
                found[f"{prefix}.{expert}.{down}.weight"] = its
            else:
                found[f"{prefix}.{expert}.{gate}.weight"], found[f"{prefix}.{expert}.{up}.weight"] = its.chunk(2)
        if not (x.dim() == 3 and matrix in ("gate_up_proj", "down_proj")):
            found[name] = x
    return found


def by_model_name(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """The inverse of `by_checkpoint_name`."""
    if family not in EXPERTS:
        return dict(tensors)
    mixture, (gate, up), down = EXPERTS[family]
    found = {}
    for name, x in tensors.items():
        plain = name.replace(f".{mixture}.", ".mlp.")
        if ".experts.0." not in name:
            found |= {} if ".experts." in name else {plain: x}
            continue
        prefix, _, matrix = name.removesuffix(".weight").rpartition(".experts.0.")
        num_experts = sum(key.startswith(prefix + ".experts.") and key.endswith(f".{down}.weight") for key in tensors)
        parts = {
            part: [tensors[f"{prefix}.experts.{expert}.{part}.weight"] for expert in range(num_experts)]
            for part in (gate, up, down)
        }
        experts = plain.partition(".experts.0.")[0] + ".experts"
        if matrix == down:
            found[experts + ".down_proj"] = torch.stack(parts[down])
        else:
            gates_and_ups = zip(parts[gate], parts[up], strict=True)
            found[experts + ".gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gates_and_ups])
    return found


def make_prompts(path: Path, count: int, seed: int = 0) -> Path:
    """Sums of two numbers, one a line."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            a, b = rng.randrange(1000), rng.randrange(100)
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    return path


IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES |= {"image_size": 28, "patch_size": 14}
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"vision_config": IMAGES, "mm_tokens_per_image": 4}),
    **dict.fromkeys(
        ("ministral3", "mistral"),
        (
            "Mistral3",
            {"vision_config": {**IMAGES, "model_type": "pixtral", "head_dim": 8}, "tie_word_embeddings": False},
        ),
    ),
}


def make_window_wrapper(directory: Path, family: str, *, num_layers: int = 2, head_dim: int = 8) -> Path:
    """DIRECTORY: Gemma 3, Ministral 3 or Mistral Small as it is published, beside what reads images."""
    prefix, whole = WRAPPERS[family]
    torch.manual_seed(11)
    text = {
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": num_layers},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": head_dim, "max_position_embeddings": 128},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, **FAMILIES[family][1]},
    }
    if prefix == "Mistral3":
        text["model_type"] = family
    config = getattr(transformers, prefix + "Config")(text_config=text, architectures=None, **whole)
    model = getattr(transformers, prefix + "ForConditionalGeneration")(config)
    randomise(model, 0.15)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
