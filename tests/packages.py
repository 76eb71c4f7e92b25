"""Environments of packages from the index that the project's own lacks."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SECONDS = 800  # of an install


def python_with(home: Path, packages: Sequence[str], *, beside: str = "") -> Path:
    """The Python of a new environment with these packages, and with those of the directory `beside`, if any.

    The test is skipped where they do not install.
    """
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    if beside:
        own = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (own / "beside.pth").write_text(f"import site; site.addsitedir({beside!r})\n")
    install = [home / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    try:
        ran = subprocess.run(install, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{', '.join(packages)}: not installed within {SECONDS} s")
    if ran.returncode:
        pytest.skip(f"{', '.join(packages)} do not install here: {(ran.stderr.strip().splitlines() or ['?'])[-1]}")
    return home / "bin" / "python"
