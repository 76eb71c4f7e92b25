"""The console scripts of pyproject.toml, started as pip writes them, from a directory that is not the repository's."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hybridflow.cli.main import COMMANDS
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import ROOT, of_no_rank
from tests.messages import like

SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
ALIASES = [name for name in SCRIPTS if name != "hybridflow"]  # which tests/cli looks at
# what stands for each where it is started by `python -m`
MODULES = {name: f"hybridflow.{name.removeprefix('hybridflow-')}" for name in ALIASES}
MODULES |= {f"hybridflow-{name}": f"tools.{name.replace('-', '_')}" for name in ("convert", "make-tiny")}
MODULES |= {f"hybridflow-{name}": f"tools.{name.replace('-', '_')}" for name in ("plot-curve", "stages")}
WITHOUT_ARGUMENTS = ("hybridflow-health",)  # commands that do something without any
# what pip puts into bin/; -P, because a script's directory is bin/ and not the working directory
CODE = "import sys; from {module} import {function}; sys.argv[0] = {name!r}; sys.exit({function}())"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models, prompts and a config whose paths count from it, and a user's reward function."""
    here = tmp_path_factory.mktemp("elsewhere")
    make_inputs(here / "inputs")
    config = write_config(here / "config.yaml", Path("inputs"))
    tree = json.loads(config.read_text())
    tree["reward"] = {"functions": [{"function": "my_rewards:LIMIT"}]}
    tree["output_dir"] = "runs"
    (here / "experiments").mkdir()
    (here / "experiments" / "mine.yaml").write_text(json.dumps(tree))
    (here / "experiments" / "my_rewards.py").write_text("LIMIT = 3\n")
    return here


def run(name: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    module, _, function = SCRIPTS[name].partition(":")
    return subprocess.run(
        [sys.executable, "-P", "-c", CODE.format(module=module, function=function, name=name), *map(str, arguments)],
        cwd=cwd,
        env=of_no_rank(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_every_command_has_one() -> None:
    """`hybridflow COMMAND` and, for one version, `hybridflow-COMMAND`, lead to the same."""
    aliases = {f"hybridflow-{name}": f"{module}:main" for name, (module, _) in COMMANDS.items()}
    assert SCRIPTS["hybridflow"] == "hybridflow.cli.main:main"
    once = {
        f"hybridflow-{name}" for name in ("train", "launch", "chat", "config", "env", "eval", "make-sums")
    }  # that never had a script
    drawn = {"hybridflow-plot-curve": "hybridflow.cli.plot_curve:main"}
    staged = {"hybridflow-stages": "hybridflow.examples.tiny.stages:main"}
    expected = {name: path for name, path in aliases.items() if name not in once} | drawn | staged
    assert {name: path for name, path in SCRIPTS.items() if name != "hybridflow"} == expected


@pytest.mark.parametrize("name", ALIASES)
def test_help_and_wrong_arguments_have_their_status(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, function = SCRIPTS[name].partition(":")
    main = getattr(importlib.import_module(module), function)
    without_any = [] if name in WITHOUT_ARGUMENTS else [([], 2)]
    for arguments, status in ((["--help"], 0), (["--no-such-option"], 2), *without_any):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == status
        out, error = capsys.readouterr()
        assert (error if status else out).startswith("usage: ")


@pytest.mark.parametrize("name", ALIASES)
def test_help_names_the_command_as_it_was_started(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, function = SCRIPTS[name].partition(":")
    main = getattr(importlib.import_module(module), function)
    plain = f"python -m {MODULES[name]}"
    for started, shown in (
        (f"/usr/bin/{name}", name),
        ("/somewhere/train.py", plain),
        ("/somewhere/__main__.py", plain),
    ):
        monkeypatch.setattr(sys, "argv", [started])
        with pytest.raises(SystemExit):
            main(["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {shown} [-h]")


@pytest.mark.slow
def test_plan(here: Path) -> None:
    done = run("hybridflow-plan", "experiments/mine.yaml", "--smallest", cwd=here)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    done = run("hybridflow-plan", "experiments/mine.yaml", "actor.model=inputs/absent", cwd=here)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        like("hybridflow-plan: error: inputs/absent/config.json: no such file; a model is a HuggingFace directory"),
        like("hybridflow-plan: error: reward function my_rewards:LIMIT: is a int, which cannot be called"),
        like(
            "hybridflow-plan: error: to plan before a model is there, give a model of the same sizes, such as its base "
            "model: actor.model=BASE"
        ),
    ]


@pytest.mark.thorough
def test_health(here: Path) -> None:
    done = run("hybridflow-health", "experiments/mine.yaml", "actor.tensor_parallel_size=1", cwd=here)
    assert done.returncode == 1
    found = [line for line in done.stdout.splitlines() if line.startswith("fail: inputs, ")]
    assert len(found) == 1 and "my_rewards:LIMIT: is a int, which cannot be called" in found[0]


@pytest.mark.thorough
def test_convert(here: Path) -> None:
    assert run("hybridflow-convert", "hf-to-megatron", "inputs/policy", "converted", cwd=here).returncode == 0
    assert run("hybridflow-convert", "verify", "inputs/policy", "converted", cwd=here).returncode == 0
    assert run("hybridflow-convert", "verify", "inputs/reference", "converted", cwd=here).returncode == 1


def test_plot_curve(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "metrics.csv").write_text("iteration,eval/accuracy\n0,0.5\n1,0.75\n")
    assert run("hybridflow-plot-curve", "pictures/curve.svg", "run", cwd=here).returncode == 0
    assert "run: 0.50 to 0.75" in (here / "pictures" / "curve.svg").read_text()
    assert run("hybridflow-plot-curve", "pictures/curve.svg", "absent", cwd=here).returncode == 1


@pytest.mark.thorough
def test_make_tiny(here: Path) -> None:
    done = run("hybridflow-make-tiny", "inputs", cwd=here)
    told = "hybridflow-make-tiny: error: inputs exists; --overwrite replaces it\n"
    assert (done.returncode, done.stderr) == (1, told)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("my_rewards:LIMIT", "is a int, which cannot be called"),  # so it was found
        (
            "your_rewards:digits",
            "cannot import your_rewards: ModuleNotFoundError: No module named 'your_rewards'; looked in {path}, "
            "{here}, {here}/experiments, and the installed packages",
        ),
    ],
)
@pytest.mark.thorough
def test_train_looks_beside_the_config_for_a_function(here: Path, function: str, problem: str) -> None:
    """In a world of one, before a model is built."""
    keys = ["actor.tensor_parallel_size=1", f"reward.functions.0.function={function}"]
    done = run("hybridflow", "experiments/mine.yaml", *keys, cwd=here)
    assert done.returncode == 1
    problem = problem.format(path=ROOT, here=here)
    assert done.stderr.splitlines() == [f"hybridflow: error: reward function {function}: {problem}"]
    assert not (here / "runs").exists()
