"""What vLLM 0.32.0 reads from the environment, for an engine in this process. Set before vLLM is imported."""

import os
import re

KUBERNETES = re.compile(r"(tcp|udp|sctp)://")  # of a service called vllm a pod has VLLM_PORT=tcp://10.0.0.1:8000


def set_environment() -> None:
    """May be called again."""
    for name in [name for name, value in os.environ.items() if name.startswith("VLLM_") and KUBERNETES.match(value)]:
        del os.environ[name]  # vLLM takes it for a port of its own, and ends with an error
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core runs in this process, not in a child
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # the default is 1. Every engine then imports FlashInfer before the first token, and fails where FlashInfer is not
    # installed or does not import. FlashInfer's sampler takes no request with a seed, and all requests here have one
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    # the default is 1. FlashInfer then compiles at the first sum on all ranks at once, takes memory that no plan
    # counts, and hangs where it fails on one rank alone; it has not run with hybridflow so far.
    # Its sums have no fixed order: in bfloat16 routers of two ranks may then choose other experts for a token
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
