"""Writes launch/constraints*.txt.

    python -m tests.constraints           constraints.txt and constraints_cpu.txt, from what is installed here
    python -m tests.constraints cuda      constraints_cuda.txt, by `uv pip compile` from the metadata of packages
    python -m tests.constraints check     whether the last is whole and still to be had; writes nothing

The first names the releases of what pyproject.toml asks for, the second of what these ask for in turn. vLLM for GPUs
asks for other releases in turn, so the third has the whole set for GPUs. uv has to be on the PATH for it.
"""

import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
OWN, IN_TURN, CUDA = (LAUNCH / f"constraints{kind}.txt" for kind in ("", "_cpu", "_cuda"))
EXTRAS = frozenset({"cpu", "hub", "wandb", "mlflow", "docs", "dev"})
HEADS = {
    OWN: "# The releases, of what pyproject.toml asks for, that all tests run with. launch/setup.sh installs these.\n",
    IN_TURN: "# The releases of what those ask for in turn. launch/setup.sh --cpu installs these.\n",
}
WRITTEN = "# Written by: .venv/bin/python -m tests.constraints\n"
CUDA_HEAD = """\
# The whole set for GPUs: Python 3.12, Linux on x86-64, CUDA 13. launch/setup.sh --cuda installs these.
# Resolved, all of it, from the metadata of the packages by `uv pip compile`, on a machine without a GPU, on {date};
# a job of .github/workflows/ci.yaml resolves it again. Nobody has installed it yet: transformer-engine-torch is to be
# compiled where it is installed.
# Written by: .venv/bin/python -m tests.constraints cuda
"""
CUDA_EXTRAS = ("cuda", "hub", "wandb", "mlflow", "docs", "dev")
CUDA_PLATFORM = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28")


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
    for name, version in releases.items():
        by_python = [one for one in stated if one.name == name and "python_version" in str(one.marker)]
        yield from (f"{one}\n" for one in by_python) if by_python else (f"{name}=={version}\n",)


def resolved(*constraints: Path) -> str:
    """The whole set for GPUs, a line each, that agrees with these files."""
    command = ["uv", "pip", "compile", "pyproject.toml", *CUDA_PLATFORM, "--quiet", "--no-annotate", "--no-header"]
    command += [word for extra in CUDA_EXTRAS for word in ("--extra", extra)]
    command += [word for file in constraints for word in ("--constraint", str(file))]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def main(arguments: list[str]) -> None:
    if arguments == ["cuda"]:
        CUDA.write_text(CUDA_HEAD.format(date=date.today()) + resolved(OWN))
    elif arguments == ["check"]:
        before = {line for line in CUDA.read_text().splitlines() if not line.startswith("#")}
        differing = before ^ set(resolved(CUDA).splitlines())
        if differing:
            sys.exit(f"{CUDA}: resolved anew, these differ: {', '.join(sorted(differing))}")
    elif arguments:
        sys.exit(f"python -m tests.constraints {' '.join(arguments)}: takes nothing, cuda or check")
    else:
        for file, releases in wanted().items():
            file.write_text(HEADS[file] + WRITTEN + "".join(_lines(releases)))
            print(f"{file}: {len(releases)} releases")


if __name__ == "__main__":
    main(sys.argv[1:])
