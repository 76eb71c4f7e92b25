"""vLLM in this process: the only package that imports it."""
