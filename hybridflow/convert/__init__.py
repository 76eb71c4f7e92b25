"""Checkpoints between HuggingFace and megatron-core, complete or not at all: `python -m tools.convert --help`."""
