"""The releases whose private parts we replace or build upon, and the one place that names them beside pyproject.toml.

Another release may have moved what a patch replaces: some of that fails, some of it gives wrong numbers.
"""

from hybridflow.errors import EnvironmentProblem

SEEN = {"vllm": "0.32.0", "megatron-core": "0.16.1", "torch": "2.13.0"}


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
