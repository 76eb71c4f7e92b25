"""Writes launch/constraints*.txt.

    python -m tests.constraints             constraints.txt and constraints_cpu.txt, from what is installed here
    python -m tests.constraints cuda        constraints_cuda.txt, by `uv pip compile` from the metadata of packages
    python -m tests.constraints cuda check  whether that set is still to be had, is installed here, and goes together

The first names the releases of what pyproject.toml asks for, the second of what these ask for in turn. vLLM for GPUs
asks for other releases in turn, so the third has the whole set for GPUs. uv has to be on the PATH for it. The check
runs in the environment that `bash launch/setup.sh --cuda` makes, with or without a GPU.
"""

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hybridflow.inspection.imports import LIBRARIES, Owners, version

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
OWN, IN_TURN, CUDA = (LAUNCH / f"constraints{kind}.txt" for kind in ("", "_cpu", "_cuda"))
OVER = LAUNCH / "overrides_cuda.txt"
EXTRAS = frozenset({"cpu", "hub", "wandb", "mlflow", "docs", "dev"})
HEADS = {
    OWN: "# The releases, of what pyproject.toml asks for, that all tests run with. launch/setup.sh installs these.\n",
    IN_TURN: "# The releases of what those ask for in turn. launch/setup.sh --cpu installs these.\n",
}
WRITTEN = "# Written by: .venv/bin/python -m tests.constraints\n"
CUDA_HEAD = """\
# The whole set for GPUs: Python 3.12, Linux on x86-64, CUDA 13. launch/setup.sh --cuda installs these, and
# overrides_cuda.txt over them. Resolved from the metadata of the packages by `uv pip compile` on {date}.
# Installed and imported, on a machine without a GPU: `python -m tests.constraints cuda check` there, also by a job of
# .github/workflows/ci.yaml. Which parts ran on a GPU: docs/explanation/gpus.md.
# Written by: .venv/bin/python -m tests.constraints cuda
"""
# Of releases that metadata allow, those that fit: the compiler of CUDA 13.0 beside torch's headers and libraries.
# FlashInfer compiles with it where the machine has no toolkit.
CUDA_CHOICES = tuple(f"nvidia-{name}>=13.0,<13.1" for name in ("cuda-nvcc", "cuda-crt", "cuda-cccl", "nvvm"))
CUDA_EXTRAS = ("cuda", "hub", "wandb", "mlflow", "docs", "dev")
CUDA_PLATFORM = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28")

# Left at the top of site-packages by packages that were built carelessly; nobody imports them from there.
SHARED = ("build_backend.py",)


def needed(name: str = "hybridflow", extras: frozenset[str] = EXTRAS) -> Iterator[Requirement]:
    """What a package asks for in this environment, with these extras."""
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield requirement


def installed() -> dict[str, str]:
    """Name and release of all that hybridflow needs and that is installed, without local parts such as +cpu."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(needed())
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = Version(distribution(name).version).public
        except PackageNotFoundError:  # torchvision and the like, which launch/setup.sh removes
            continue
        waiting += needed(name, extras)
    return dict(sorted(found.items()))


def pinned(file: Path, python: str | None = None) -> dict[str, str]:
    """Name and release of every line of a file that is for a Python, this one unless another is named."""
    lines = [Requirement(line) for line in file.read_text().splitlines() if not line.startswith("#")]
    environment = {} if python is None else {"python_version": python}
    here = [line for line in lines if line.marker is None or line.marker.evaluate(environment)]
    return {line.name: str(line.specifier).removeprefix("==") for line in here}


def wanted() -> dict[Path, dict[str, str]]:
    """What the files have to say of this environment."""
    own = {canonicalize_name(requirement.name) for requirement in needed()} | {"setuptools"}
    found = installed()
    return {
        OWN: {name: version for name, version in found.items() if name in own},
        IN_TURN: {name: version for name, version in found.items() if name not in own},
    }


def _lines(releases: dict[str, str]) -> Iterator[str]:
    """Where Python chooses between two releases, both, as pyproject.toml has them."""
    stated = [Requirement(text) for text in distribution("hybridflow").requires or ()]
    for name, release in releases.items():
        by_python = [one for one in stated if one.name == name and "python_version" in str(one.marker)]
        yield from (f"{one}\n" for one in by_python) if by_python else (f"{name}=={release}\n",)


def resolved(*constraints: Path) -> str:
    """The whole set for GPUs, a line each, that agrees with these files."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as choices:
        choices.write("\n".join(CUDA_CHOICES))
        choices.flush()
        command = ["uv", "pip", "compile", "pyproject.toml", *CUDA_PLATFORM, "--quiet", "--no-annotate", "--no-header"]
        command += [word for extra in CUDA_EXTRAS for word in ("--extra", extra)]
        command += [word for file in (*constraints, choices.name) for word in ("--constraint", str(file))]
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def check() -> list[str]:
    """What is wrong with the set for GPUs, a line each."""
    before = {line for line in CUDA.read_text().splitlines() if not line.startswith("#")}
    anew = [f"resolved anew, this differs: {line}" for line in sorted(before ^ set(resolved(CUDA).splitlines()))]
    return [*anew, *unlike_files(), *asked_and_not_there(), *files_of_two(Owners()), *names_without_library()]


def unlike_files() -> Iterator[str]:
    """Packages whose release here is not that of the files, which extras that are not installed leave out."""
    over = pinned(OVER)
    for name, wanted_release in (pinned(CUDA) | over).items():
        found = version(name)
        if Version(found).public != wanted_release if found else name in over:
            yield f"{name}: {found or 'nothing'} is installed, the files have {wanted_release}"


def asked_and_not_there() -> Iterator[str]:
    """What `pip check` says beside what launch/overrides_cuda.txt has changed on purpose."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if done.returncode and not any(name in line for name in pinned(OVER)):
            yield f"pip check: {line}"


def files_of_two(owners: Owners) -> Iterator[str]:
    """Pairs of packages that own the same file: whoever is installed last has it."""
    for names, file in owners.of_one_file():
        if Path(file).name not in SHARED:
            yield f"{' and '.join(names)} own the same file, with other contents: {file}"


def names_without_library() -> Iterator[str]:
    """Functions of NVIDIA's libraries that an installed library asks for and the installed release has not."""
    site = Path(sysconfig.get_path("purelib"))
    asked: dict[str, Path] = {}
    there: set[str] = set()
    for library in sorted(site.rglob("*.so*")):
        said = subprocess.run(["nm", "-D", "--without-symbol-versions", str(library)], capture_output=True, text=True)
        for line in said.stdout.splitlines():
            kind, name = line.split()[-2:]
            if not name.startswith(tuple(LIBRARIES)) or name.startswith("_Z"):
                continue
            if kind == "U":
                asked.setdefault(name, library)
            else:
                there.add(name)
    for name in sorted(asked.keys() - there):
        yield f"{asked[name].relative_to(site)} asks for {name}, which no installed library has"


def main(arguments: list[str]) -> None:
    if arguments == ["cuda"]:
        CUDA.write_text(CUDA_HEAD.format(date=date.today()) + resolved(OWN))
    elif arguments == ["cuda", "check"]:
        wrong = check()
        if wrong:
            sys.exit("\n".join(wrong))
        print(f"{CUDA.name} with {OVER.name}: resolved anew, installed, and of one piece")
    elif arguments:
        sys.exit(f"python -m tests.constraints {' '.join(arguments)}: takes nothing, cuda or cuda check")
    else:
        for file, releases in wanted().items():
            file.write_text(HEADS[file] + WRITTEN + "".join(_lines(releases)))
            print(f"{file}: {len(releases)} releases")


if __name__ == "__main__":
    main(sys.argv[1:])
