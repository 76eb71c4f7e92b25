"""The wheel holds hybridflow alone, with its configs and sources, and trains where there is no repository."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs
from tests.launch import ROOT, of_no_rank

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of what git tracks, and of files that it does not ignore."""
    root = tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            target = root / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", root]
    done = subprocess.run(command, cwd=root / "source", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    [built] = root.glob("*.whl")
    return built


def test_what_is_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
    assert {name.partition("/")[0] for name in names} == {"hybridflow", info}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    expected = {name for name in tracked if name.startswith("hybridflow/")}
    expected |= {f"hybridflow/{name}" for name in tracked if name.startswith("configs/")}
    assert expected - set(names) == set()
    assert {"hybridflow/py.typed", "hybridflow/configs/quickstart.yaml"} <= set(names)
    assert any(name.endswith(".c") for name in names) and "hybridflow/reporting/page.js" in names


@pytest.mark.distributed
def test_it_trains_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """The quickstart's config, of three iterations; packages are those of the environment that runs the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=600)
    python = tmp_path / "venv" / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, timeout=600)
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    env = of_no_rank(OMP_NUM_THREADS="1")
    env.pop("PYTHONPATH", None)

    def run(program: Path, *arguments: object) -> str:
        command = [str(program), *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(
        python,
        "-P",
        "-c",
        "import hybridflow; from hybridflow.config.shipped import *; print(hybridflow.__file__, shipped_configs())",
    )
    assert where.split() == [str(own / "hybridflow" / "__init__.py"), str(own / "hybridflow" / "configs")]
    for config in (own / "hybridflow" / "configs").rglob("*.yaml"):  # an editor finds the schema from each
        assert (config.parent / config.read_text().splitlines()[0].partition("$schema=")[2]).is_file(), config
    inputs = make_inputs(tmp_path / "inputs")
    models = {"actor": "policy", "reference": "policy", "critic": "reward", "reward.models.0": "reward"}
    overrides = [f"{key}.model={inputs / name}" for key, name in models.items()]
    overrides += [f"data.{key}={inputs / f'{key}.jsonl'}" for key in ("train", "heldout")]
    overrides += ["num_iterations=3", "data.prompts_per_iteration=4", "algorithm.update.mini_batch_size=4"]
    run(python.with_name("hybridflow"), "train", own / "hybridflow" / "configs" / "quickstart.yaml", *overrides)
    [written] = (tmp_path / "runs").iterdir()
    assert len((written / "metrics.csv").read_text().splitlines()) >= 4
    assert json.loads((written / "hf" / "config.json").read_text())["model_type"]
