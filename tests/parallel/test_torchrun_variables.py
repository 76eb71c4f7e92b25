"""Variables of a rank that no launcher has set: a pod's, a debugger's, what a shell still has."""

import os

import pytest

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.torchrun import check_rank, forget_world_of_one, is_rank

POD = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
LAUNCHER = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*POD, *LAUNCHER):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def put(environment: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)


@pytest.mark.parametrize("variables", [POD, {"RANK": "0"}])
def test_a_world_of_one_that_nobody_launched_is_no_rank(
    variables: dict[str, str], environment: pytest.MonkeyPatch
) -> None:
    """As Kubeflow has it in a pod of one replica with several GPUs: all of them are used."""
    put(environment, **variables)
    forget_world_of_one()
    assert not is_rank() and not POD.keys() & os.environ.keys()


@pytest.mark.parametrize("more", [{"WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_ranks_of_a_launcher_and_of_several_pods_stay(more: dict[str, str], environment: pytest.MonkeyPatch) -> None:
    put(environment, **(POD | more))
    forget_world_of_one()
    assert is_rank() and os.environ["MASTER_ADDR"] == "localhost"
    check_rank(None)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_rank_that_is_to_start_ranks_names_the_variables(nproc: int, environment: pytest.MonkeyPatch) -> None:
    put(environment, **(POD | {"WORLD_SIZE": "2"}))
    with pytest.raises(EnvironmentProblem, match=rf"--nproc {nproc}: RANK = 0 and WORLD_SIZE = 2 are set.*-u RANK"):
        check_rank(nproc)


def test_ranks_that_the_command_has_started_know_its_nproc(environment: pytest.MonkeyPatch) -> None:
    put(environment, **(POD | {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}))
    check_rank(2)
    with pytest.raises(EnvironmentProblem, match="WORLD_SIZE = 2"):
        check_rank(3)


def test_left_over_variables_without_an_address_are_told(environment: pytest.MonkeyPatch) -> None:
    put(environment, RANK="1", WORLD_SIZE="2")
    with pytest.raises(EnvironmentProblem, match=r"RANK = 1 and WORLD_SIZE = 2 are set.*MASTER_ADDR is not"):
        check_rank(None)
