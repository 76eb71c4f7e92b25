"""What vLLM 0.32.0 reads from the environment, for an engine in this process. Set before vLLM is imported."""

import os


def set_environment() -> None:
    """May be called again."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core runs in this process, not in a child
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # the default is 1. Every engine then imports FlashInfer before the first token, and fails where FlashInfer is not
    # installed or does not import. FlashInfer's sampler takes no request with a seed, and all requests here have one
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
