"""Which device a process computes on, by a torch that pretends to be built for CUDA or not, and to see a device."""

import os
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from hybridflow.cpu.megatron import overlays
from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.device import CHOSEN, choose_platform, current_device, device_name, uses_cuda
from hybridflow.parallel.layout import PlatformName

OLD_DRIVER = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is chosen here holds for no other test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delitem(os.environ, CHOSEN, raising=False)
    with warnings.catch_warnings():
        yield


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """torch is built for CUDA or not, sees a device or not, and warns of what is wrong or says it when CUDA is used."""

    def install(*, built: bool, sees: bool, warns: str = "", raises: str = "no device") -> None:
        def is_available() -> bool:
            if warns:
                warnings.warn(warns, stacklevel=1)
            return sees

        def init() -> None:
            raise RuntimeError(raises)

        monkeypatch.setattr(torch.version, "cuda", "13.0" if built else None)
        monkeypatch.setattr(torch, "__version__", "2.13.0" if built else "2.13.0+cpu")
        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")

    return install


# (asked, built for CUDA, sees a device) -> computes on CUDA
@pytest.mark.parametrize(
    ("platform", "built", "sees", "expected"),
    [
        ("auto", True, True, True),
        ("auto", False, False, False),
        ("cuda", True, True, True),
        ("cpu", True, True, False),
        ("cpu", True, False, False),
        ("cpu", False, False, False),
    ],
)
def test_the_device_that_is_chosen(
    platform: PlatformName, built: bool, sees: bool, expected: bool, pretend: Callable[..., None]
) -> None:
    pretend(built=built, sees=sees)
    choose_platform(platform)
    assert uses_cuda() is expected
    assert current_device() == (torch.device("cuda", 3) if expected else torch.device("cpu"))
    assert device_name() == ("CUDA (NVIDIA H100)" if expected else "CPU")


@pytest.mark.parametrize(
    ("platform", "built", "message"),
    [
        ("auto", True, "platform: auto: torch 2.13.0, built for CUDA 13.0, sees no CUDA device: "),
        ("cuda", True, "platform: cuda: torch 2.13.0, built for CUDA 13.0, sees no CUDA device: "),
        ("cuda", False, "platform: cuda: torch 2.13.0+cpu, built for CPUs, sees no CUDA device: "),
    ],
)
@pytest.mark.parametrize("call", [choose_platform, platforms.prepare_imports, lambda p: platforms.start(0, p)])
def test_a_missing_device_is_an_error_that_says_why(
    call: Callable, platform: PlatformName, built: bool, message: str, pretend: Callable[..., None]
) -> None:
    platforms.quiet_libraries()  # which must not hide it
    pretend(built=built, sees=False, warns=OLD_DRIVER, raises="No CUDA GPUs are available")
    with pytest.raises(EnvironmentProblem) as caught:
        call(platform)
    reasons = f"{OLD_DRIVER}; No CUDA GPUs are available"
    assert str(caught.value) == f"{message}{reasons}. `platform: cpu` in the config trains on CPUs"


def test_the_cpu_once_chosen_stays_and_hides_the_devices_from_others(pretend: Callable[..., None]) -> None:
    pretend(built=True, sees=True)
    choose_platform("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    choose_platform("auto")
    assert not uses_cuda()
    choose_platform("cuda")  # the word of the config is stronger
    assert uses_cuda()


def test_what_a_config_would_choose(pretend: Callable[..., None]) -> None:
    pretend(built=True, sees=True)
    assert (uses_cuda("cpu"), uses_cuda("auto"), uses_cuda("cuda")) == (False, True, True)
    pretend(built=True, sees=False)
    assert (uses_cuda("cpu"), uses_cuda("auto"), uses_cuda("cuda")) == (False, False, True)


@pytest.mark.parametrize(("platform", "shown"), [("auto", [OLD_DRIVER]), ("cpu", [])])
def test_warnings_of_cuda_are_shown_where_it_is_used(
    platform: PlatformName, shown: list[str], pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlays, "prepare", lambda: None)
    with warnings.catch_warnings(record=True) as caught:
        pretend(built=True, sees=True)
        platforms.prepare_imports(platform)
        warnings.warn(OLD_DRIVER, stacklevel=1)
    assert [str(warning.message) for warning in caught] == shown


def test_megatron_is_told_that_there_is_no_cuda_where_the_cpu_is_chosen(pretend: Callable[..., None]) -> None:
    pretend(built=True, sees=True)
    assert overlays.TORCH.cuda.is_available() is False
    assert overlays.TORCH.cuda.current_stream() is None  # megatron-core 0.19.2 asks before it sums gradients
    assert overlays.TORCH.zeros(1, device="cuda").device.type == "cpu"
