"""Checkpoints between HuggingFace and megatron-core, complete or not at all: `hybridflow convert --help`."""
