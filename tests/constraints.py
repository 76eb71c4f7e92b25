"""Writes launch/constraints*.txt from what is installed in this environment: `python -m tests.constraints`.

The first names the releases of what pyproject.toml asks for, the second of what these ask for in turn. vLLM for GPUs
asks for other releases in turn, so launch/setup.sh --cuda takes the first alone.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
OWN, IN_TURN = LAUNCH / "constraints.txt", LAUNCH / "constraints_cpu.txt"
EXTRAS = frozenset({"cpu", "hub", "wandb", "mlflow", "docs", "dev"})
HEADS = {
    OWN: "# The releases, of what pyproject.toml asks for, that all tests run with. launch/setup.sh installs these.\n",
    IN_TURN: "# The releases of what those ask for in turn. launch/setup.sh --cpu installs these.\n",
}
WRITTEN = "# Written by: .venv/bin/python -m tests.constraints\n"


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


def pinned(file: Path) -> dict[str, str]:
    """Name and release of every line of a file."""
    lines = [line.partition("==") for line in file.read_text().splitlines() if not line.startswith("#")]
    return {name: version for name, _, version in lines}


def wanted() -> dict[Path, dict[str, str]]:
    """What the files have to say of this environment."""
    own = {canonicalize_name(requirement.name) for requirement in needed()} | {"setuptools"}
    found = installed()
    return {
        OWN: {name: version for name, version in found.items() if name in own},
        IN_TURN: {name: version for name, version in found.items() if name not in own},
    }


if __name__ == "__main__":
    for file, releases in wanted().items():
        file.write_text(HEADS[file] + WRITTEN + "".join(f"{name}=={version}\n" for name, version in releases.items()))
        print(f"{file}: {len(releases)} releases")
