"""Both widths of vectors, on a machine that has AVX-512."""

import ctypes
import shutil

import pytest

from hybridflow.native import attention, decoder, layers, linear, matrix, paged, sampling, threads
from hybridflow.native import library as libraries


@pytest.fixture(scope="session")
def narrow(tmp_path_factory) -> ctypes.CDLL:
    """As a CPU without AVX-512 has the kernels."""
    compiler = next(filter(None, map(shutil.which, libraries.COMPILERS)))
    return ctypes.CDLL(str(libraries.compiled(compiler, tmp_path_factory.mktemp("narrow"), ["-mno-avx512f"])))


@pytest.fixture(params=["native", "avx2"])
def kernels(request, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "avx2":
        narrow = request.getfixturevalue("narrow")
        for module in (attention, decoder, layers, linear, matrix, paged, sampling, threads):
            monkeypatch.setattr(module, "library", lambda: narrow)
