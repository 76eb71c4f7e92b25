"""Checkpoint formats: HuggingFace directories of safetensors, and torch_dist directories of megatron-core."""
