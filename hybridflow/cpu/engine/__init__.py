"""The vLLM engine on a CPU: what is changed in vLLM, and the kernels that it computes with."""
