"""Kernels in C for CPUs, where torch's own leave most of the machine idle."""
