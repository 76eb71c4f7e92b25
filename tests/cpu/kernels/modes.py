"""The ways in which this CPU can run the kernels, known before they are compiled."""

from pathlib import Path


def has_matrix_units() -> bool:
    return "amx_tile" in _features()


def has_wide_vectors() -> bool:
    return "avx512f" in _features()


def modes() -> list[str]:
    """As they are; with matrix units everywhere, and nowhere; as a CPU without AVX-512 has them."""
    units = ["units everywhere", "no units"] if has_matrix_units() else []
    return ["native", *units, *(["avx2"] if has_wide_vectors() else [])]


def _features() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
