"""Runs the blocks of commands that a page marks with `<!-- run -->`, in a copy of the checkout, page by page.

A page's blocks run in their order in one directory, under `set -e`, after the files that its blocks with
`<!-- file: NAME -->` show. The copy has a `.venv` of its own over the packages of this environment, as a finished
`launch/setup.sh` leaves one, so that nothing is installed. Tiny models that one page has made are there for the next.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import ROOT, of_no_rank
from tests.pages import DOCS, PAGES, Block, blocks_of

pytestmark = [pytest.mark.thorough, pytest.mark.distributed]
SECONDS = 1500  # of a page's blocks together; the longest takes 180 on two cores, and 600 beside much other work
RUNNABLE = [page for page in PAGES if any(block.runs for block in blocks_of(page))]
SCRIPT = "#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages have made in `data/`."""
    return tmp_path_factory.mktemp("pages") / "data"


@pytest.fixture
def checkout(tiny_models: Path, tmp_path: Path) -> Iterator[Path]:
    """What git tracks, and files that it does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    make_venv(tmp_path)
    if tiny_models.exists():
        tiny_models.rename(tmp_path / "data")
    yield tmp_path
    if (tmp_path / "data").exists():
        (tmp_path / "data").rename(tiny_models)


def make_venv(root: Path) -> None:
    venv = root / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=600)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (own / "checkout.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    for name, module in (("hybridflow", "hybridflow.cli.main"), ("torchrun", "torch.distributed.run")):
        script = venv / "bin" / name
        script.write_text(SCRIPT.format(python=venv / "bin" / "python", module=module))
        script.chmod(0o755)
    constraints = (root / "launch" / name for name in ("setup.sh", "constraints.txt", "constraints_cpu.txt"))
    files = [root / "pyproject.toml", *constraints]  # as launch/setup.sh takes them
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (venv / "setup.stamp").write_text(f"cpu\n{version}\n{root}\n{digest}\n")


def script_of(blocks: list[Block]) -> str:
    lines = ["set -euo pipefail"]
    for block in blocks:
        if block.runs:
            lines += [f"echo '=== {block.place}'", block.text]
    return "\n".join(lines)


def write_files(blocks: list[Block], root: Path) -> None:
    for block in blocks:
        if block.file is not None:
            (root / block.file).parent.mkdir(parents=True, exist_ok=True)
            (root / block.file).write_text(block.text)


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.timeout(SECONDS + 120)
def test_what_a_page_runs_runs(page: Path, checkout: Path) -> None:
    blocks = list(blocks_of(page))
    write_files(blocks, checkout)
    environment = of_no_rank(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VIRTUAL_ENV=str(checkout / ".venv"))
    environment.pop("PYTHONPATH", None)
    environment["PATH"] = f"{checkout / '.venv' / 'bin'}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script_of(blocks)],
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_some_pages_run() -> None:
    assert DOCS / "getting-started" / "quickstart.md" in RUNNABLE
