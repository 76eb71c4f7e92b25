"""Both widths of vectors, on a machine that has AVX-512; and with and without matrix units, on one that has them."""

import ctypes
import shutil

import pytest
import torch

from hybridflow.cpu.kernels import attention, decoder, layers, linear, matrix, paged, sampling, vocabulary
from hybridflow.cpu.kernels import library as libraries
from tests.cpu.kernels.modes import modes


@pytest.fixture(scope="session")
def needs_units(needs_kernels: None) -> None:
    if not matrix.has_units():
        pytest.skip("no matrix units: the kernel does not permit them")


@pytest.fixture(scope="session")
def narrow(tmp_path_factory) -> ctypes.CDLL:
    """As a CPU without AVX-512 has the kernels."""
    compiler = next(filter(None, map(shutil.which, libraries.COMPILERS)))
    return ctypes.CDLL(str(libraries.compiled(compiler, tmp_path_factory.mktemp("narrow"), ["-mno-avx512f"])))


EVERYWHERE = {torch.float32: 1, torch.bfloat16: 1}  # also where they do not pay


@pytest.fixture(params=modes())
def kernels(request, monkeypatch: pytest.MonkeyPatch, needs_kernels: None) -> None:
    if "units" in request.param:
        request.getfixturevalue("needs_units")
    if request.param == "units everywhere":
        monkeypatch.setattr(attention, "WORTH_UNITS", EVERYWHERE)
        monkeypatch.setattr(linear, "FEWEST", EVERYWHERE)
    if request.param == "no units":
        monkeypatch.setattr(matrix, "_given_up", [True])
    if request.param == "avx2":
        narrow = request.getfixturevalue("narrow")
        for module in (attention, decoder, layers, linear, matrix, paged, sampling, vocabulary):
            monkeypatch.setattr(module, "library", lambda: narrow)
