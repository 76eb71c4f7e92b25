"""The generated tables of docs/models/: what a family's config.json must say, and planned layouts.

    <!-- generated: family Qwen3 -->          sizes and rules of the family
    <!-- generated: layouts Qwen3 -->         planned memory and reshard of LAYOUTS["Qwen3"], and the commands

No model is run and no weights are read: a plan is arithmetic over config.json.
"""

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from docs.generator.markdown import code, listed, table
from hybridflow.architecture.families import FAMILIES
from hybridflow.architecture.family import ConfigFieldRule, Family, WindowTraits
from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weights import num_parameters
from hybridflow.config import ExperimentConfig, read_tree
from hybridflow.placement.forecast import forecast
from hybridflow.placement.placed import place

ROOT = Path(__file__).resolve().parents[2]
CONFIG, SHAPES = Path("docs/models/layouts.yaml"), Path("configs/shapes")
GIB = 1 << 30
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
WIDTH = 100  # of the lines of a command
GPU_BYTES, SPARE_BYTES = 80 * 10**9, 8 * 10**9  # a GPU of 80 GB, and what no plan counts: CUDA, NCCL, graphs


@dataclass(frozen=True)
class Layout:
    """A model on so many GPUs. pp: of the actor and the reference; the engine has engine_tp alone."""

    shape: str
    gpus: int
    tp: int = 1
    pp: int = 1
    engine_tp: int = 1
    recompute: str = "selective"
    ep: int = 1  # of the actor and the reference; the engine as the actor

    @property
    def overrides(self) -> list[str]:
        model, sizes = SHAPES / self.shape, {"tensor": self.tp, "pipeline": self.pp, "expert": self.ep}
        keys = [f"{role}.model={model}" for role in ("actor", "reference")]
        for role in ("actor", "reference"):
            keys += [f"{role}.{kind}_parallel_size={size}" for kind, size in sizes.items() if size > 1]
        if self.tp > 1:
            keys.append("actor.sequence_parallel=true")
        if self.ep > self.tp > 1:  # replicas share experts
            keys.append("reference.sequence_parallel=true")
        if self.recompute != "selective":
            keys.append(f"actor.recompute={self.recompute}")
        return [*keys, f"rollout.tensor_parallel_size={self.engine_tp}"]

    @property
    def command(self) -> str:
        first, second, *others = self.overrides
        wrapped = textwrap.wrap(" ".join(others), WIDTH, break_on_hyphens=False)
        lines = [f"hybridflow plan {CONFIG} --world-size {self.gpus}", f"{first} {second}", *wrapped]
        return " \\\n    ".join(lines)


LAYOUTS = {
    "Llama": (
        Layout("llama-3.2-1b", 1),
        Layout("llama-3-8b", 8, tp=2),
        Layout("llama-3.3-70b", 64, tp=8, pp=4, engine_tp=8, recompute="full"),
    ),
    "Mistral": (
        Layout("mistral-7b", 1),
        Layout("mistral-7b", 8, tp=2),
        Layout("mistral-small-24b", 64, tp=4, pp=2, engine_tp=2),
    ),
    "Qwen2": (
        Layout("qwen2.5-0.5b", 1),
        Layout("qwen2.5-7b", 8, tp=2),
        Layout("qwen2-72b", 64, tp=8, pp=4, engine_tp=8, recompute="full"),
    ),
    "Qwen3": (
        Layout("qwen3-0.6b", 1),
        Layout("qwen3-8b", 8, tp=2),
        Layout("qwen3-32b", 64, tp=8, engine_tp=4),
    ),
    "Qwen3_5": (
        Layout("qwen3.5-4b", 1),
        Layout("qwen3.5-9b", 8, tp=2),
        Layout("qwen3.5-27b", 64, tp=8, engine_tp=4),
    ),
    "Qwen3_5Moe": (
        Layout("qwen3.5-35b-a3b", 1),
        Layout("qwen3.5-35b-a3b", 8, tp=8, ep=8, engine_tp=8, recompute="full"),
        Layout("qwen3.5-35b-a3b", 16, tp=8, ep=8, engine_tp=8, recompute="full"),
        Layout("qwen3.5-122b-a10b", 64, tp=8, pp=4, ep=8, engine_tp=8, recompute="full"),
    ),
    "Gemma3": (
        Layout("gemma-3-4b", 1),
        Layout("gemma-3-4b", 8, tp=2),
        Layout("gemma-3-27b", 64, tp=8, engine_tp=4),
    ),
    "Phi3": (Layout("phi-4", 1), Layout("phi-4", 8, tp=2), Layout("phi-4", 64, tp=2, pp=2, engine_tp=2)),
    "Ministral3": (
        Layout("ministral-3-8b", 1),
        Layout("ministral-3-8b", 8, tp=2),
        Layout("ministral-3-8b", 64, tp=4, engine_tp=2),
    ),
    "SmolLM3": (Layout("smollm3-3b", 1), Layout("smollm3-3b", 8, tp=2), Layout("smollm3-3b", 64, tp=2)),
    "Olmo3": (Layout("olmo-3-7b", 1), Layout("olmo-3-7b", 8, tp=2), Layout("olmo-3-7b", 64, tp=4, engine_tp=2)),
    "Glm": (Layout("glm-4-9b", 1), Layout("glm-4-9b", 8, tp=4), Layout("glm-4-9b", 64, tp=4, engine_tp=2)),
    "OPT": (
        Layout("opt-1.3b", 1),
        Layout("opt-6.7b", 8, tp=2),
        Layout("opt-66b", 64, tp=8, pp=4, engine_tp=8, recompute="full"),
    ),
    "Mixtral": (
        Layout("mixtral-8x7b", 1),
        Layout("mixtral-8x7b", 8, tp=8, ep=8, engine_tp=8, recompute="full"),
        Layout("mixtral-8x7b", 64, tp=8, pp=2, ep=8, engine_tp=8),
    ),
    "Qwen3Moe": (
        Layout("qwen3-30b-a3b", 1),
        Layout("qwen3-30b-a3b", 8, tp=8, ep=8, engine_tp=8, recompute="full"),
        Layout("qwen3-30b-a3b", 64, tp=8, ep=8, engine_tp=8),
    ),
    "Glm4Moe": (
        Layout("glm-4.5-air", 1),
        Layout("glm-4.5-air", 8, tp=8, ep=8, engine_tp=8, recompute="full"),
        Layout("glm-4.5-air", 64, tp=8, pp=2, ep=8, engine_tp=8, recompute="full"),
    ),
    "Glm4MoeLite": (
        Layout("glm-4.7-flash", 1),
        Layout("glm-4.7-flash", 8, tp=4, ep=8, engine_tp=4, recompute="full"),
        Layout("glm-4.7-flash", 64, tp=4, ep=4, engine_tp=4, recompute="full"),
    ),
    "DeepseekV3": (
        Layout("moonlight-16b-a3b", 1),
        Layout("moonlight-16b-a3b", 8, tp=8, ep=8, engine_tp=8),
        Layout("deepseek-v3", 64, tp=8, ep=8, engine_tp=8, recompute="full"),
    ),
}


def part(what: str) -> str:
    """The text between two marks. what: the kind of part and the family."""
    kind, name = what.split()
    return {"family": family_table, "layouts": layout_table}[kind](name)


# ------------------------------------------------------------------------------------------------ layouts


def layout_table(name: str) -> str:
    rows = [_layout_row(layout, plan(layout)) for layout in LAYOUTS[name]]
    titles = ("Model", "GPUs", "Actor, reference", "Engine", "Training", "Generation", "Fits in 80 GB")
    moved = ("Model", "GPUs", "Received by a rank", "By all ranks", "Permuted in place", "Lower bound")
    commands = "\n".join(layout.command for layout in LAYOUTS[name])
    return (
        f"GiB of the fullest GPU:\n\n{table(titles, rows)}\n"
        f"What a weight sync moves, from the trainer to the engine:\n\n"
        f"{table(moved, [_reshard_row(layout, plan(layout)) for layout in LAYOUTS[name]])}\n"
        f"<!-- run -->\n```bash\n{commands}\n```"
    )


@cache
def plan(layout: Layout) -> dict[str, Any]:
    """What `hybridflow plan --json` tells, by the same functions."""
    tree = read_tree(ROOT / CONFIG, layout.overrides)
    for role in ("actor", "reference"):
        tree[role]["model"] = str(ROOT / tree[role]["model"])
    return forecast(place(ExperimentConfig.from_tree(tree, CONFIG), layout.gpus))


def _layout_row(layout: Layout, found: dict[str, Any]) -> tuple[str, ...]:
    moments = [found["memory"][moment]["worst_rank"]["total"] for moment in ("training", "generation")]
    moments[1] += found["reshard"]["peak_extra_bytes"]["max"]
    dp = layout.gpus // (layout.tp * layout.pp)
    fits = max(moments) + SPARE_BYTES <= GPU_BYTES
    grid = " ".join(f"{short} {size}" for short, size in (("tp", layout.tp), ("pp", layout.pp), ("dp", dp)))
    grid += f" ep {layout.ep}" if layout.ep > 1 else ""
    engines = layout.gpus // layout.engine_tp
    return (
        _model(layout.shape),
        str(layout.gpus),
        grid,
        f"{engines} of tp {layout.engine_tp}" if engines > 1 else f"tp {layout.engine_tp}",
        *(f"{moment / GIB:.1f}" for moment in moments),
        "yes" if fits else "**no**",
    )


def _reshard_row(layout: Layout, found: dict[str, Any]) -> tuple[str, ...]:
    reshard = found["reshard"]
    received = reshard["received_bytes"]
    return (
        _model(layout.shape),
        str(layout.gpus),
        _size(received["max"]),
        _size(received["total"]),
        _size(reshard["permuted_bytes"]["max"]),
        _size(reshard["lower_bound_bytes"]["max"]),
    )


def _model(shape: str) -> str:
    spec = read_spec(ROOT / SHAPES / shape)
    return f"{shape} ({num_parameters(spec, spec.head) / 1e9:.1f} B)"


def _size(count: int) -> str:
    return "0" if count == 0 else f"{count / GIB:.2f} GiB" if count >= GIB // 100 else f"{count / (1 << 20):.2f} MiB"


# ------------------------------------------------------------------------------------------------ what a family is


def family_table(name: str) -> str:
    family = FAMILIES[name]
    score = family.score_architecture or f"{name}ForSequenceClassification"
    wrapper = [family.wrapper] if family.wrapper else []
    rows = [("Architectures", listed([f"{name}ForCausalLM", *wrapper, score]))]
    latent = ("q_lora_rank", *LATENT_SIZES) if family.mixer == "latent" else ()
    rows += [("`config.json` must have", listed([*family.required, *latent]))]
    rows += [(f"`{rule.key}`", f"{_allowed(rule)}, else an error: {rule.reason}") for rule in family.rules]
    return table(("What", "How"), [*rows, *_traits(family)])


def _allowed(rule: ConfigFieldRule) -> str:
    shown = [code(str(value).lower()) for value in rule.allowed if value is not None]
    return " or ".join(shown if rule.required else [*shown, "absent"])


def _traits(family: Family) -> list[tuple[str, str]]:
    """What sets it apart from Llama, as a person reads it."""
    traits, latent, part = family.attention, family.mixer == "latent", family.default("partial_rotary_factor")
    attention = [
        "biases of queries, keys and values" if traits.bias else "",
        "RMSNorm over each head of queries and keys" if traits.norms == "heads" else "",
        f"RMSNorm over each head of queries and keys, where `{traits.norms_key}` is true" if traits.norms_key else "",
        "the outputs times a sigmoid of a gate" if traits.gate else "",
        "gated delta nets in the layers that `layer_types` says" if family.mixer == "delta_net" else "",
        "RMSNorm over all heads of queries, and of keys" if traits.norms == "all" else "",
        f"scores divided by the root of `{traits.scale_key}`" if traits.scale_key else "",
        _window(family.windows) if family.windows else "",
        "latent (MLA): `kv_lora_rank` + `qk_rope_head_dim` numbers a token in the KV cache" if latent else "",
    ]
    rotary = "learned positions" if family.embedding.position_offset else "rotary"
    if latent:
        rotary += " over `qk_rope_head_dim` dimensions of a head"
    if part != 1:
        rotary = f"rotary over {part:.0%} of a head".replace("%", " %")
    if family.rotation.interleaved or latent:
        rotary += ", neighbouring dimensions together"
    if family.rotation.by_layer:
        rotary += ", of other bases in layers with windows"
    if family.mixer == "unturned":
        rotary += ", but for the layers that `no_rope_layers` says"
    if traits.grows:
        rotary += "; queries grow with their positions, by `llama_4_scaling_beta`"
    rows = [
        ("Attention", "; ".join(filter(None, attention)) or "grouped heads"),
        ("Positions", rotary),
        ("Norms", _norms(family)),
        ("MLP", _mlp(family)),
    ]
    if family.experts:
        router = "sigmoid with a frozen bias, in float32" if family.experts.sigmoid else "softmax, in the model's dtype"
        if family.experts.in_groups:
            router += "; experts of the `topk_group` best of `n_group` groups"
        rows.append(("Router", router))
    return rows


def _norms(family: Family) -> str:
    if family.norms.eps is not None:
        return "LayerNorm"
    norm = "RMSNorm times 1 + weight" if family.norms.zero_centered else "RMSNorm"
    where = {"before": "", "around": ", in front of attention and MLP and behind them", "behind": ", behind both alone"}
    return norm + where[family.norms.place]


ACTIVATIONS = {"swiglu": "SwiGLU", "geglu": "GELU, approximated by tanh, of a gate", "relu": "ReLU"}


def _mlp(family: Family) -> str:
    traits, activation = family.experts, ACTIVATIONS[family.mlp.activation]
    if traits is None:
        return activation
    experts = f"{activation}; experts: {listed(traits.count_keys)} of them"
    if traits.shared_count_key:
        experts += f", and `{traits.shared_count_key}` for every token"
    if traits.shared_size_key:
        experts += f", and one of `{traits.shared_size_key}` for every token, times a sigmoid of a gate"
    if traits.dense_layers_key:
        experts += f"; none in the first `{traits.dense_layers_key}` layers"
    return experts


def _window(traits: WindowTraits) -> str:
    if traits.layers == "layer_types":
        return "a sliding window in the layers that `layer_types` says"
    if traits.layers == "all":
        return "a sliding window in all layers, where `sliding_window` gives one"
    return "a sliding window, where `use_sliding_window` is true" if traits.switch else "a sliding window"


def marks(text: str) -> list[str]:
    """The parts that a page has."""
    return re.findall(r"<!-- generated: ([^>]*?) -->", text)
