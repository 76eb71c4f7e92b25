"""A device of round numbers, and a small model, for sums by hand."""

from pathlib import Path
from typing import Any

from hybridflow.architecture.spec import ModelSpec
from hybridflow.automap.cost import Device
from hybridflow.automap.device import DeviceProfile, Overheads

NO_OVERHEADS = dict.fromkeys(Overheads.model_fields, 0.0)
FIELDS: dict[str, Any] = {
    "name": "round",
    "measured": False,
    "sources": dict.fromkeys(("memory_bytes", "products", "memory_bandwidth", "inside", "between"), "made up"),
    "memory_bytes": 8 << 30,
    "products": {"float32": {"peak": 1e6}, "bfloat16": {"peak": 2e6}},
    "attention_forward": 1e5,
    "attention_backward": 5e4,
    "memory_bandwidth": 1e9,
    "elementwise_bandwidth": 1e5,
    "logits_forward": 1e4,
    "logits_backward": 5e3,
    "inside": {"bandwidth": 1e4, "latency": 0.5},
    "between": {"bandwidth": 1e3, "latency": 2.0, "sharers": 4},
    "overheads": NO_OVERHEADS,
    "host_bandwidth": 1e4,
    "disk_bandwidth": 1e3,
    "ranks_per_host": 8,
}


def profile(**changes: Any) -> DeviceProfile:
    return DeviceProfile.model_validate(FIELDS | changes)


def device(**changes: Any) -> Device:
    return Device(profile(**changes))


def overheads(**changes: float) -> dict[str, float]:
    return NO_OVERHEADS | changes


def small_spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "path": Path("nowhere"),
        "family": "llama",
        "head": "lm",
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 60,  # padded to 64
        "norm_eps": 1e-6,
        "tied": False,
        "max_positions": 64,
    }
    return ModelSpec(**(fields | changes))
