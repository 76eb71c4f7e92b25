"""Families whose layers differ in how far attention reaches: for `tiny_models`."""

from typing import Any

WINDOW_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "sliding_window_pattern": 2,  # every second layer has none
            "sliding_window": 6,  # shorter than most sequences of the tests
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 6}),
    "ministral3": (
        "Ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}
