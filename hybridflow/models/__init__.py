"""Megatron-core models: what they are, how their weights are laid out, how they run on packed batches."""
