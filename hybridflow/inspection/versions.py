"""Which packages are installed, whether they are the releases that go together, and whether apex is NVIDIA's.

Everything is read from what lies on the disk. Nothing is imported: a package built for another torch or driver may hang
or end the process that imports it, and vLLM takes seconds.
"""

import importlib.util
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from hybridflow.inspection.findings import Finding, Status
from hybridflow.parallel.device import uses_cuda
from hybridflow.parallel.versions import (
    DISTRIBUTIONS,
    PAIRS,
    SEEN,
    distribution_version,
    fits_patches,
    installed_set,
    installed_version,
    tries_versions,
    within,
)

AREA = "packages"
SETUP = "bash launch/setup.sh, with --cuda for GPUs, installs the releases that go together"
PYTHONS = ((3, 11), (3, 12))  # as pyproject.toml says
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
NVIDIA_SMI_SECONDS = 15  # a GPU in trouble makes it wait for ever


def installed() -> dict[str, str | None]:
    """Version by package, None where it is not installed; of CUDA the one that torch is built for."""
    found: dict[str, str | None] = {package: installed_version(package) for package in DISTRIBUTIONS}
    return found | {"CUDA": torch.version.cuda, "nvidia-cublas": distribution_version("nvidia-cublas")}


def version_findings(found: Mapping[str, str | None], host: str, *, cuda: bool) -> list[Finding]:
    """Of Python, the packages, CUDA, and of the pairs they make."""
    python = platform.python_version_tuple()
    supported = (int(python[0]), int(python[1])) in PYTHONS
    advice = "" if supported else "hybridflow needs Python 3.11 or 3.12: bash launch/setup.sh --python python3.11"
    findings = [Finding(AREA, "Python", host, platform.python_version(), "ok" if supported else "fail", advice=advice)]
    findings.append(_set(host))
    findings += [
        _package(package, version, host, cuda=cuda) for package, version in found.items() if package in DISTRIBUTIONS
    ]
    return findings + [_apex(host, cuda=cuda), *_cuda_findings(host)] + pair_findings(found, host)


def pair_findings(found: Mapping[str, str | None], host: str) -> list[Finding]:
    """One for each two installed packages that some row of PAIRS has something to say about. Pure."""
    findings = []
    for package, partner in dict.fromkeys((pair.package, pair.partner) for pair in PAIRS):
        version, other = found.get(package), found.get(partner)
        if version is not None and other is not None:
            findings.append(_pair(package, version, partner, other=other, host=host))
    return findings


def _pair(package: str, version: str, partner: str, *, other: str, host: str) -> Finding:
    name, value = f"{package} with {partner}", f"{version} with {other}"
    rows = [pair for pair in PAIRS if (pair.package, pair.partner) == (package, partner)]
    known = next((pair for pair in rows if within(version, pair.releases)), None)
    if known is None:
        return Finding(
            AREA, name, host, value, "warn", advice=f"no release of {partner} is known to go with it: {SETUP}"
        )
    if within(other, known.accepts):
        return Finding(AREA, name, host, value)
    return Finding(AREA, name, host, value, "fail", advice=f"{package} {version} needs {known.asks_for()}: {SETUP}")


def _set(host: str) -> Finding:
    """Whether all releases together are a set that hybridflow names."""
    name, releases = installed_set()
    if name is None:
        return Finding(AREA, "set", host, f"none that is known: {releases}", "warn", advice=SETUP)
    return Finding(AREA, "set", host, f"for {name}")


def _package(package: str, version: str | None, host: str, *, cuda: bool) -> Finding:
    wanted = SEEN.get(package)
    if version is None and (wanted or package == "transformers"):
        return Finding(AREA, package, host, "not installed", "fail", advice=SETUP)
    if version is None:
        return _absent_option(package, host, cuda=cuda)
    if wanted and not fits_patches(package, version):
        parts = f"hybridflow replaces private parts of {package} {' or '.join(wanted)}"
        if tries_versions():
            return Finding(
                AREA, package, host, version, "warn", advice=f"{parts}; HYBRIDFLOW_TRY_VERSIONS=1 tries this one"
            )
        return Finding(AREA, package, host, version, "fail", advice=f"{parts}, and refuses any other: {SETUP}")
    return Finding(AREA, package, host, version)


def _absent_option(package: str, host: str, *, cuda: bool) -> Finding:
    if not cuda:
        return Finding(AREA, package, host, "not installed; for GPUs only")
    if package == "transformer-engine":
        advice = "layers run unfused without it: bash launch/setup.sh --cuda installs it"
        return Finding(AREA, package, host, "not installed", "warn", advice=advice)
    return Finding(AREA, package, host, "not installed; not needed: torch and vLLM bring their own")


# ------------------------------------------------------------------------------------------------ apex

Apex = Literal["absent", "NVIDIA's", "NVIDIA's, without its CUDA extensions", "not NVIDIA's"]
APEX_SOURCE = "https://github.com/NVIDIA/apex"
EXTENSIONS = ("amp_C", "fused_weight_gradient_mlp_cuda")  # compiled modules beside the package


def apex_at(package: Path | None, beside: Path | None) -> Apex:
    """Which apex is installed, by the files in `package`. beside: the directory with apex's compiled modules.

    NVIDIA's has apex/multi_tensor_apply/. The one on PyPI adds sign-in pages to the Pyramid web framework.
    """
    if package is None:
        return "absent"
    if not (package / "multi_tensor_apply").is_dir():
        return "not NVIDIA's"
    built = beside is not None and all(any(beside.glob(f"{name}*.so")) for name in EXTENSIONS)
    return "NVIDIA's" if built else "NVIDIA's, without its CUDA extensions"


def _apex(host: str, *, cuda: bool) -> Finding:
    spec = importlib.util.find_spec("apex")
    package = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    extension = importlib.util.find_spec(EXTENSIONS[0])
    beside = Path(extension.origin).parent if extension and extension.origin else None
    return apex_finding(apex_at(package, beside), package, host, cuda=cuda)


def apex_finding(kind: Apex, package: Path | None, host: str, *, cuda: bool) -> Finding:
    if kind == "not NVIDIA's":
        advice = f"pip uninstall apex; NVIDIA's is on no package index, it is built from {APEX_SOURCE}"
        return Finding(AREA, "apex", host, f"not NVIDIA's: {package} has no multi_tensor_apply", "warn", advice=advice)
    if kind == "NVIDIA's, without its CUDA extensions":
        advice = f"build it again with --cpp_ext --cuda_ext: {APEX_SOURCE}; without them it is of no use here"
        return Finding(AREA, "apex", host, kind, "warn" if cuda else "ok", advice=advice if cuda else "")
    return Finding(AREA, "apex", host, "not installed; optional, for GPUs" if kind == "absent" else kind)


# ------------------------------------------------------------------------------------------------ CUDA


def _cuda_findings(host: str) -> list[Finding]:
    """Of CUDA, driver and NCCL."""
    if torch.version.cuda is None:
        return [Finding(AREA, "CUDA", host, "none: torch is built for CPUs")]
    findings = [Finding(AREA, "CUDA", host, f"{torch.version.cuda}, that torch is built for"), _driver(host)]
    if uses_cuda():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        findings.append(Finding(AREA, "NCCL", host, nccl))
    return findings


def _driver(host: str) -> Finding:
    status: Status = "fail" if uses_cuda() else "warn"
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, errors="replace", timeout=NVIDIA_SMI_SECONDS, check=True)
    except FileNotFoundError:
        return Finding(
            AREA, "driver", host, "nvidia-smi is not there", "warn", advice="install NVIDIA's driver and its tools"
        )
    except (subprocess.SubprocessError, OSError) as error:
        advice = "run nvidia-smi on that host; where it hangs or fails, restart the host"
        return Finding(AREA, "driver", host, f"nvidia-smi: {error}", status, advice=advice)
    return Finding(AREA, "driver", host, ", ".join(dict.fromkeys(done.stdout.split())) or "nvidia-smi names none")
