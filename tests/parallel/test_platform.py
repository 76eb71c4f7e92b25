"""Which rank reports an error: the first one, and every one where nobody can say which was first.

And what stands before a process group is made: how long its collectives wait, what NCCL records.
"""

import gc
import logging
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridflow.cpu.megatron import overlays
from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.parallel.gloo import use_one_thread
from hybridflow.parallel.standalone_groups import StandaloneGroup


class Store:
    def __init__(self, answer: Callable[[], int]) -> None:
        self._answer, self.timeouts = answer, []

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout)

    def add(self, key: str, amount: int) -> int:
        assert (key, amount) == ("hybridflow/errors", 1)
        return self._answer()


def gone() -> int:
    raise dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed.")


def silent() -> int:
    raise dist.DistStoreError("wait timeout after 30000ms")


@pytest.mark.parametrize(("answer", "first"), [(lambda: 1, True), (lambda: 2, False), (gone, True), (silent, True)])
def test_the_first_to_fail_reports_and_everybody_where_the_store_is_gone(
    answer: Callable[[], int], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(answer)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert platforms.first_to_fail() is first
    assert store.timeouts == [timedelta(seconds=30)]


def test_a_store_that_cannot_be_met_is_no_error_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert platforms.first_to_fail() is True


@pytest.mark.parametrize(("rank", "first"), [("0", True), ("1", False)])
def test_without_a_store_rank_0_reports(rank: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("RANK", rank)
    assert platforms.first_to_fail() is first


@pytest.fixture
def default_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(dist.distributed_c10d, name, getattr(dist.distributed_c10d, name))


@pytest.mark.usefixtures("default_timeouts")
@pytest.mark.parametrize(("longest", "minutes"), [(0.0, 30), (7200.0, 130)])
def test_a_group_made_without_a_time_out_waits_for_longer_than_a_phase_may_take(longest: float, minutes: int) -> None:
    """torch would give it 30 minutes, whatever the world has."""
    timeout = platforms._set_default_timeouts(longest)
    assert timeout == timedelta(minutes=minutes)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        group = dist.new_group([0])
        found = {group._get_backend(torch.device("cpu")).options._timeout for group in (group, dist.group.WORLD)}
        assert found == {timeout}
    finally:
        dist.destroy_process_group()
    assert dist.distributed_c10d._get_default_timeout("nccl") == timeout


@pytest.fixture
def gloo_of_torch() -> Iterator[None]:
    own = dist.ProcessGroupGloo.__init__
    yield
    dist.ProcessGroupGloo.__init__ = own


@pytest.mark.usefixtures("gloo_of_torch")
def test_a_group_of_gloo_is_on_the_interface_that_is_named() -> None:
    use_one_thread("lo,lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        assert (len(options._devices), options._threads) == (2, 1)
    finally:
        dist.destroy_process_group()
    use_one_thread("lo,eth77")
    with pytest.raises(RuntimeError, match="Unable to find address for: eth77"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("gloo_of_torch")
def test_a_group_of_gloo_has_one_thread() -> None:
    """torch's two free the same memory twice where collectives overlap."""
    use_one_thread()
    timeout = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        groups = [dist.group.WORLD, dist.new_group([0], timeout=timeout)]
        options = [group._get_backend(torch.device("cpu")).options for group in groups]
        alone = StandaloneGroup(dist.HashStore(), "alone", rank=0, size=1, timeout=timeout)
        assert [(o._threads, o._timeout) for o in [*options, alone._gloo.options]] == [(1, timeout)] * 3
        whole, own = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
        dist.all_gather_into_tensor(whole, own)
        assert whole.tolist() == [1.0, 2.0, 3.0]
    finally:
        dist.destroy_process_group()


NCCL = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")


@pytest.mark.parametrize(
    ("cuda", "given", "found"),
    [
        (False, {}, {}),
        (True, {}, {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
        (
            True,
            {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
            {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        ),
        (True, {"TORCH_FR_BUFFER_SIZE": "9"}, {"TORCH_FR_BUFFER_SIZE": "9", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
    ],
)
def test_nccl_records_unless_the_user_has_decided(
    cuda: bool, given: dict[str, str], found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "uses_cuda", lambda: cuda)
    for name in NCCL:
        monkeypatch.setenv(name, "")  # put back as it was when the test is over
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    platforms._prepare_diagnosis()
    assert {name: os.environ[name] for name in NCCL if name in os.environ} == found


def test_the_names_that_nccl_reads_are_those_of_this_torch() -> None:
    """Its headers name them."""
    headers = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    text = "".join((headers / name).read_text() for name in ("FlightRecorder.hpp", "ProcessGroupNCCL.hpp"))
    for name in NCCL:
        assert f'"{name}"' in text, name


# ------------------------------------------------------------------------------------------------ hosts


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({}, "node 0=1"),
        ({"WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3"}, "node 0=2,node 1=2,node 2=2"),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "1"}, "node 0=6"),  # as vLLM leaves it
        ({"WORLD_SIZE": "5", "GROUP_WORLD_SIZE": "2"}, "node 0=5"),  # unlike nodes, and nobody tells which
        ({"WORLD_SIZE": "5", "GROUP_WORLD_SIZE": "2", "HYBRIDFLOW_HOSTS": "a=2,b=3"}, "a=2,b=3"),
    ],
)
def test_ranks_by_host(variables: dict[str, str], hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "HYBRIDFLOW_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert torchrun.hosts_of_ranks() == hosts


def test_restarts_of_torchrun_and_of_the_launcher_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("HYBRIDFLOW_RESTARTS", "3")
    assert torchrun.restart_count() == 5


def test_a_configs_environment_yields_to_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("HF_OF_THE_CONFIG", raising=False)
    torchrun.set_environment({"NCCL_DEBUG": "WARN", "HF_OF_THE_CONFIG": "1"})
    assert os.environ["NCCL_DEBUG"] == "INFO" and os.environ["HF_OF_THE_CONFIG"] == "1"
    monkeypatch.delenv("HF_OF_THE_CONFIG")


# ------------------------------------------------------------------------------------------------ as torchrun tells it

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "HYBRIDFLOW_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("environment", "started"),
    [
        ((), torchrun.Started(0, 1, 0, 1, 0)),
        (("5", "8", "1", "4", "1"), torchrun.Started(5, 8, 1, 4, 1)),
        (("5", "8", "1", "2"), torchrun.Started(5, 8, 1, 2, 2)),  # without GROUP_RANK: as many on each host
    ],
)
def test_where_torchrun_has_started_a_rank(
    environment: tuple[str, ...], started: torchrun.Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(TORCHRUN, environment, strict=False):
        monkeypatch.setenv(name, value)
    assert torchrun.started() == started


@pytest.mark.usefixtures("alone")
def test_a_host_is_called_as_the_launcher_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms.socket, "gethostname", lambda: "vm")
    assert torchrun.host_name() == "vm"
    monkeypatch.setenv("HYBRIDFLOW_HOST", "node-a")
    assert torchrun.host_name() == "node-a"


@pytest.mark.usefixtures("alone")
def test_each_meeting_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torchrun.meeting_store(timedelta(seconds=5))
    own.set("key", "alone")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    one, other = (torchrun.meeting_store(timedelta(seconds=5)) for _ in range(2))
    one.set("key", "first")
    assert not other.check(["key"])
    monkeypatch.setenv("RANK", "1")  # meets rank 0 where it has come as often
    assert torchrun.meeting_store(timedelta(seconds=5)).get("key") == b"first"


@pytest.mark.usefixtures("alone")
@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "HYBRIDFLOW_HOST": "node-b"}
    for name, value in (given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentProblem, match=r"rank 1 on node-b cannot reach the store .*127.0.0.1:9"):
        torchrun.meeting_store(timedelta(seconds=1))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("expands", [True, False])
def test_what_stays_is_left_out_of_the_search_for_garbage_and_memory_may_grow(
    device: str, expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA alone. vLLM searches twice an iteration there; what is garbage already goes before."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)

    class Circle:
        def __init__(self) -> None:
            self.me = self

    garbage = weakref.ref(Circle())
    try:
        platforms.Platform(torch.device(device), rank=0, local_rank=0, world_size=1).settle(expandable_segments=expands)
        assert told == ["expandable_segments:True"] * (expands and device == "cuda")
        assert (gc.get_freeze_count() > 10_000) is (device == "cuda")
        assert device == "cpu" or garbage() is None
    finally:
        gc.unfreeze()


def test_a_module_of_megatron_that_comes_later_is_adapted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is looked for where no module has come: each model and each optimizer asks."""
    platforms.adapt_megatron()
    later = types.ModuleType("megatron.core.later")
    later.torch = torch
    monkeypatch.setitem(sys.modules, later.__name__, later)
    platforms.adapt_megatron()
    assert later.torch is overlays.TORCH
    later.torch = torch
    platforms.adapt_megatron()
    assert later.torch is torch


@pytest.mark.parametrize(
    "message",
    [
        "MimoModelConfig is experimental and still under active development",
        "full scope is deprecated",
        "Apex is missing",
    ],
)
def test_what_megatron_says_of_its_own_parts_is_kept_out(message: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        platforms.quiet_libraries()
        warnings.warn(message, UserWarning, stacklevel=1)
        warnings.warn("of the user's own", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["of the user's own"]


@pytest.mark.parametrize("cuda", [False, True])
def test_that_torch_finds_no_cuda_is_kept_out_where_a_cpu_is_meant(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "uses_cuda", lambda: cuda)
    logger = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    logger.manager._clear_cache()
    platforms.quiet_libraries()
    assert logger.isEnabledFor(logging.WARNING) == cuda


class OnHopper:
    """What torch's compiler asks before it speaks of TF32."""

    is_available, get_device_capability = staticmethod(lambda: True), staticmethod(lambda: (9, 0))


def test_what_megatron_and_the_compiler_say_on_gpus_is_not_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own words, by their own code: a mixture of 64 experts, float32 products in two places of the compiler."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import fuse_attention

    for name in ("is_available", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, getattr(OnHopper, name))

    def speak(quiet: Callable[[], object]) -> list[str]:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            quiet()
            TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2, num_moe_experts=64)
            for module in (compile_fx, fuse_attention):
                module._warn_tf32_disabled.__wrapped__()
        return [
            str(each.message)
            for each in heard
            if "experts" in str(each.message) or "TF32" in str(each.message) or "TensorFloat32" in str(each.message)
        ]

    assert len(speak(lambda: None)) == 3
    assert speak(platforms.quiet_libraries) == []


def test_an_address_of_kubernetes_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a service called master."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")
    for given in ("tcp://10.0.0.1:8000", "1234"):
        monkeypatch.delenv("RANK")
        monkeypatch.setenv("MASTER_PORT", given)
        platforms._single_process_defaults()
        assert os.environ["MASTER_PORT"].isdecimal() and (os.environ["MASTER_PORT"] == given) == given.isdecimal()
