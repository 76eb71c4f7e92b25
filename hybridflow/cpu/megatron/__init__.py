"""megatron-core on a CPU: what megatron needs to run there, and megatron's functions that faster ones replace."""
