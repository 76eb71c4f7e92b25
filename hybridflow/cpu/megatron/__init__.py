"""megatron-core on a CPU: what it needs to run there, and functions of its own that are replaced by faster ones."""
