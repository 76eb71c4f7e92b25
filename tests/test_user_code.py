"""Where a user's functions are looked for: beside the config, in the working directory, after installed packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.errors import UserCodeError
from hybridflow.user_code import load_function, search_beside
from tests.launch import ROOT
from tests.messages import like

SOURCE = "def digits(*_):\n    return {!r}\n"


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test leaves Python's path and modules as it found them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A working directory, and another that holds a config."""
    work, beside = tmp_path / "work", tmp_path / "experiments"
    work.mkdir()
    beside.mkdir()
    monkeypatch.chdir(work)
    return work, beside


def test_a_module_beside_the_config_is_found(places: tuple[Path, Path]) -> None:
    work, beside = places
    (beside / "rewards_beside.py").write_text(SOURCE.format("beside"))
    with pytest.raises(UserCodeError, match="cannot import rewards_beside"):
        load_function("rewards_beside:digits", "reward function")
    search_beside(Path("..") / "experiments" / "config.yaml")
    assert load_function("rewards_beside:digits", "reward function")() == "beside"
    assert sys.path[-2:] == [str(work), str(beside)]


def test_the_working_directory_comes_before_the_configs(places: tuple[Path, Path]) -> None:
    for directory in places:
        (directory / "rewards_twice.py").write_text(SOURCE.format(directory.name))
    search_beside(places[1] / "config.yaml")
    assert load_function("rewards_twice:digits", "reward function")() == "work"


def test_a_directory_is_added_once(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    work, beside = places
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # the working directory
    for _ in range(2):
        search_beside(beside / "config.yaml")
    assert sys.path.count(str(work)) == 0
    assert sys.path.count(str(beside)) == 1


def test_the_error_says_where_was_looked(places: tuple[Path, Path]) -> None:
    work, beside = places
    search_beside(beside / "config.yaml")
    with pytest.raises(UserCodeError) as raised:
        load_function("absent_flow:train", "algorithm.flow")
    message = str(raised.value)
    assert message.startswith(
        "algorithm.flow absent_flow:train: cannot import absent_flow: ModuleNotFoundError: No module named "
        "'absent_flow'; looked in "
    )
    assert message.endswith(f"{work}, {beside}, and the installed packages")


def test_a_module_that_cannot_import_another_was_found(places: tuple[Path, Path]) -> None:
    """Saying where it was looked for would mislead."""
    _, beside = places
    (beside / "rewards_broken.py").write_text("import a_package_that_is_not_there\n")
    search_beside(beside / "config.yaml")
    with pytest.raises(UserCodeError) as raised:
        load_function("rewards_broken:digits", "reward function")
    assert str(raised.value) == (
        like(
            "reward function rewards_broken:digits: cannot import rewards_broken: ModuleNotFoundError: No module named "
            "'a_package_that_is_not_there'"
        )
    )


def test_a_module_that_leaves_python_is_an_error(places: tuple[Path, Path]) -> None:
    work, _ = places
    (work / "rewards_script.py").write_text("import sys\nsys.exit('usage: ...')\n")
    search_beside("config.yaml")
    with pytest.raises(UserCodeError, match=r"cannot import rewards_script: SystemExit: usage: \.\.\.$"):
        load_function("rewards_script:digits", "reward function")


@pytest.mark.parametrize("first", [True, False])
def test_a_file_with_the_name_of_an_installed_package_is_refused(places: tuple[Path, Path], first: bool) -> None:
    """Whether `python -m` has put it first, or a console script last."""
    work, _ = places
    (work / "sentencepiece.py").write_text(SOURCE.format("mine"))
    sys.path.insert(0 if first else len(sys.path), str(work))
    with pytest.raises(UserCodeError) as raised:
        load_function("sentencepiece:digits", "reward function")
    message = str(raised.value)
    assert message.startswith(
        f"reward function sentencepiece:digits: sentencepiece is {work / 'sentencepiece.py'}, and also the name of an "
        "installed package, "
    )
    assert message.endswith(": rename yours")


def test_a_directory_of_data_with_the_name_of_a_package_is_no_module(places: tuple[Path, Path]) -> None:
    work, _ = places
    (work / "json").mkdir()
    search_beside("config.yaml")
    assert callable(load_function("json:dumps", "reward function"))


@pytest.mark.parametrize(("path", "message"), [("f", "x 'f': expected package"), ("json:f", "has no f")])
def test_what_names_no_function(path: str, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        load_function(path, "x")


@pytest.mark.parametrize("flags", [[], ["-P"]])
def test_in_a_fresh_interpreter(places: tuple[Path, Path], flags: list[str]) -> None:
    """With the working directory on its path as `python -m` has it, and without it as a console script."""
    work, beside = places
    (beside / "my_rewards.py").write_text(SOURCE.format("found"))
    code = (
        "from hybridflow.user_code import load_function, search_beside;"
        f"search_beside({str(beside / 'c.yaml')!r}); print(load_function('my_rewards:digits', 'r')())"
    )
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "found\n"
