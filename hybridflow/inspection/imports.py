"""Imports what a run imports, in the order of a run. Of an import that fails, names the packages that do not fit.

    python -P hybridflow/inspection/imports.py [NAME ...]

Needs the standard library alone: launch/setup.sh runs this file before the rest of hybridflow is there. A line for each
import; the exit status is 1 where one fails.
"""

import ctypes
import os
import re
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Import:
    """modules: in this order. needs: a distribution without which a run goes without them; None: a run needs them.

    compiled: modules of the build for CUDA, which load only where NVIDIA's driver is.
    """

    modules: tuple[str, ...]
    needs: str | None = None
    compiled: tuple[str, ...] = ()


# A name of `modules` after a colon is an attribute: some packages import their parts when these are asked for.
IMPORTS: Mapping[str, Import] = {
    "torch": Import(("torch",)),
    "transformers": Import(("transformers:LlamaForCausalLM",)),  # a class: these import torchvision
    "transformer_engine": Import(("transformer_engine.pytorch", "transformer_engine_torch"), "transformer-engine"),
    "megatron.core": Import(("megatron.core", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer")),
    "flashinfer": Import(("flashinfer",), "flashinfer-python"),
    "vllm": Import(
        ("vllm", "vllm:LLM", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"),
        compiled=("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"),
    ),
}
# What begins the names of a library's functions, and the package that has the library.
LIBRARIES = {
    "cublas": "nvidia-cublas",
    "cudnn": "nvidia-cudnn-cu13",
    "nccl": "nvidia-nccl-cu13",
    "cusparse": "nvidia-cusparse",
    "cusolver": "nvidia-cusolver",
    "curand": "nvidia-curand",
    "nvrtc": "nvidia-cuda-nvrtc",
    "nvshmem": "nvidia-nvshmem-cu13",
    "_ZN3c10": "torch",
    "_ZN2at": "torch",
    "_ZN5torch": "torch",
}
SYMBOL = re.compile(r"(\S+\.so[.\d]*): undefined symbol: (\w+)")
MODULE = re.compile(r"module '([\w.]+)' has no attribute|cannot import name '\w+' from '([\w.]+)'")
OPERATOR = re.compile(r"operator \w+::\w+ does not exist")
NOT_THERE = re.compile(r"No module named '([\w.]+)'")


def main(names: Sequence[str]) -> int:
    warnings.simplefilter("ignore")
    for name in names or IMPORTS:
        print(f"{name}: ", end="", flush=True)
        try:
            print(imported(name), flush=True)
        except Exception as error:  # whatever a package raises when it is imported
            print(f"fails: {type(error).__name__}: {' '.join(str(error).split())}")
            print(*(f"    {line}" for line in misfit(error)), sep="\n", flush=True)
            return 1
    return 0


def imported(name: str) -> str:
    """Imports one of IMPORTS and says so."""
    one = IMPORTS[name]
    if one.needs is not None and version(one.needs) is None:
        return "not installed; a run goes without"
    for module in one.modules:
        path, _, attribute = module.partition(":")
        found = import_module(path)
        if attribute:
            getattr(found, attribute)
    torch: Any = sys.modules.get("torch")
    if name == "torch":
        return f"ok, CUDA {torch.version.cuda or 'none'} {torch.cuda.device_count()} devices"
    if not one.compiled or torch is None or torch.version.cuda is None:
        return "ok"
    if not driver():
        return "ok, without its kernels, which need NVIDIA's driver (libcuda.so.1)"
    for module in one.compiled:
        import_module(module)
    return "ok"


def driver() -> bool:
    """Whether NVIDIA's driver is there; a GPU need not be."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def misfit(error: BaseException) -> Iterator[str]:
    """Lines that name the packages of an import that failed, with their releases."""
    owners = Owners()
    user, used, what = _parties(error, owners)
    shared = owners.of_one_file((*user, *used))
    if user and used:
        yield f"{_releases(user)} and {_releases(used)} do not fit: {what}"
    elif user:
        yield f"{_releases(user)} does not import: {what}"
    for names, file in shared:
        yield f"{_releases(names)} own the same file, with other contents: {file}"


def _parties(error: BaseException, owners: "Owners") -> tuple[list[str], list[str], str]:
    """The distributions of what fails, those of what it asks for, and what it asks for."""
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.filename for frame in frames if frame.filename not in (__file__, "<frozen importlib._bootstrap>")]
    user = next((found for file in reversed(own) if (found := owners.distributions_of(file))), [])
    if symbol := SYMBOL.search(text):
        library, name = symbol.groups()
        wanted = [package for begin, package in LIBRARIES.items() if name.startswith(begin)]
        return owners.distributions_of(library) or user, wanted, f"{Path(library).name} asks for {name}"
    if module := MODULE.search(text):
        name = module[1] or module[2]
        file = getattr(sys.modules.get(name), "__file__", None)
        return user, owners.distributions_of(file) if file else [], text
    if OPERATOR.search(text):
        return user, ["torch"], text
    if NOT_THERE.search(text):
        return user, [], f"{text}, which is not installed"
    return user, [], text


def _releases(names: Sequence[str]) -> str:
    return ", ".join(f"{name} {version(name) or '(not installed)'}" for name in names)


class Owners:
    """Which installed distributions have a file, by what they say of themselves."""

    def __init__(self) -> None:
        self._hashes: dict[str, dict[str, str]] = defaultdict(dict)  # by file and distribution
        for one in metadata.distributions():
            name, site = one.metadata["Name"], str(one.locate_file(""))
            for file in one.files or ():
                hashed = "" if file.hash is None else file.hash.value
                self._hashes[os.path.normpath(f"{site}/{file}")][name] = hashed

    def distributions_of(self, file: str) -> list[str]:
        """Names in order; empty where nobody says that it has the file."""
        return sorted(self._hashes.get(os.path.normpath(file), {}))

    def of_one_file(self, names: Sequence[str] = ()) -> list[tuple[tuple[str, ...], str]]:
        """Distributions that have the same file with other contents, and one such file. names: those that count."""
        found: dict[tuple[str, ...], str] = {}
        for file, hashes in sorted(self._hashes.items()):
            if len(set(hashes.values()) - {""}) > 1 and (not names or hashes.keys() & set(names)):
                found.setdefault(tuple(sorted(hashes)), file)
        return sorted(found.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
