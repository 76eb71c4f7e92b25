"""One code, two devices: CUDA with NCCL, or a CPU with gloo. Who needs to know which asks here what follows from it.

What megatron-core needs on a CPU is in `cpu/megatron`, which this module alone opens.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import socket
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hybridflow.cpu import fresh_pages
from hybridflow.cpu.kernels import library as kernels
from hybridflow.cpu.kernels import matrix
from hybridflow.cpu.megatron import overlays, weight_gradients
from hybridflow.cpu.megatron.products import compiles_for_shapes, repeated
from hybridflow.parallel.agreement import failures
from hybridflow.parallel.collective_record import RECORD_VARIABLE
from hybridflow.parallel.collectives import Collectives
from hybridflow.parallel.device import CPU, choose_platform, uses_cuda
from hybridflow.parallel.dropped_output import DroppedOutput
from hybridflow.parallel.gloo import use_one_thread
from hybridflow.parallel.host_memory import host_memory, peak_resident_bytes, reset_peak_resident
from hybridflow.parallel.lanes import Lanes, Streams
from hybridflow.parallel.layout import PlatformName
from hybridflow.parallel.numa import bind_beside
from hybridflow.parallel.torchrun import STORE_TIMEOUT, _agent_store, _env_int, _has_agent_store, torchrun_rank
from hybridflow.parallel.versions import check_version, replace_in

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
TIMEOUT_MARGIN = timedelta(minutes=10)  # beyond the watchdog's longest deadline
IN_C = "attention, norms, activations, rotary embedding and log-probs"


@dataclass(frozen=True)
class Platform:
    """Where this rank computes."""

    device: torch.device
    rank: int
    local_rank: int
    world_size: int

    @property
    def has_cuda(self) -> bool:
        return self.device.type == "cuda"

    def empty_caches(self) -> None:
        """Give what torch's allocator holds without use back to the device, for others to take."""
        if self.has_cuda:
            torch.cuda.empty_cache()

    def settle(self, *, expandable_segments: bool) -> None:
        """Call it when all is built. On CUDA gc.freeze takes all present objects out of garbage collection, until the
        next `start`. vLLM collects at every sleep and every wake-up on CUDA, for longer with more objects.

        expandable_segments: torch's allocator takes memory in segments that grow from here on. Not before the engine
        has captured its graphs: a custom all-reduce can show other processes no buffer of such a segment.
        """
        if self.has_cuda:
            gc.collect()
            gc.freeze()
            if expandable_segments:
                torch.cuda.memory._set_allocator_settings("expandable_segments:True")

    def free_bytes(self) -> int:
        """Memory of the device that nobody has taken: of a CPU, this rank's share of the host's."""
        if self.has_cuda:
            return int(torch.cuda.mem_get_info(self.device)[0])
        return host_memory()[0] * _env_int("GROUP_WORLD_SIZE", 1) // self.world_size

    def memory_bytes(self) -> int:
        """Memory of the device: of a CPU, this rank's share of the host's."""
        if self.has_cuda:
            return torch.cuda.get_device_properties(self.device).total_memory
        return host_memory()[1] * _env_int("GROUP_WORLD_SIZE", 1) // self.world_size

    def reset_peak_memory(self) -> None:
        """Count `peak_memory_bytes` from here on."""
        if self.has_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_peak_resident()

    def peak_memory_bytes(self) -> int:
        """The most that torch has held of the device; on a CPU the most that the process has held resident."""
        return torch.cuda.max_memory_allocated(self.device) if self.has_cuda else peak_resident_bytes()

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next measures work and not the enqueueing."""
        if self.has_cuda:
            torch.cuda.synchronize(self.device)


def start(
    seed: int, platform: PlatformName = "auto", *, longest_phase_seconds: float = 0.0, many_groups: bool = False
) -> Platform:
    """Join the process group that torchrun describes and make megatron-core usable on this rank's device.

    No collective gives up before it has waited for longer than `longest_phase_seconds`: until then the run may go on.
    many_groups: ranks share tokens or experts, so that collectives of more groups are under way at a time.

    Errors: EnvironmentProblem where there is no such device (see `choose_platform`), or another megatron-core.
    """
    prepare_imports(platform)
    gc.unfreeze()  # an earlier trainer of this process may be garbage
    if uses_cuda():
        if many_groups:  # 8 queues by default, and two collectives of one queue wait for each other's predecessors
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        local_rank = _env_int("LOCAL_RANK", 0)
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        bind_beside(torch.cuda.get_device_properties(device))
    else:
        device, backend = CPU, "gloo"
    _single_process_defaults()
    _prepare_diagnosis()
    use_one_thread(os.environ.get("GLOO_SOCKET_IFNAME", ""), _master_of_several_hosts())
    timeout = _set_default_timeouts(longest_phase_seconds)
    if not dist.is_initialized():
        join_world(backend, timeout)
    if uses_cuda():  # a communicator's first use must be one that all ranks take part in
        dist.all_reduce(torch.zeros(1, device=device), group=dist.group.WORLD)
    else:
        agree_on_kernels(world_group())
    _prepare_megatron(seed)
    return Platform(device, dist.get_rank(), _env_int("LOCAL_RANK", 0), dist.get_world_size())


def agree_on_kernels(group: dist.ProcessGroup) -> None:
    """All ranks compute with the kernels in C for CPUs, or none does: results must not depend on who computed them.

    So with the CPUs' matrix units. Collective over `group`, which must take tensors on the CPU.
    """
    missing = failures(kernels.why_not(), group)
    if missing:
        kernels.do_without("; ".join(missing))
    elif failures(None if matrix.has_units() else "this CPU has no matrix units", group):
        matrix.do_without()


def kernel_line() -> str | None:
    """For people: which kernels training takes on CPUs; None on CUDA, where packages decide (`models/kernels.py`)."""
    if uses_cuda():
        return None
    missing = kernels.why_not()
    if missing is None:
        units = " and its matrix units, which multiply float32 too" if matrix.has_units() else ""
        return f"kernels for training: {IN_C} in C, compiled for this CPU{units}"
    return f"kernels for training: {IN_C} by torch, slower than in C ({missing})"


def overlaps_exchanges() -> bool:
    """Whether what ranks exchange may travel while they compute: a GPU does both at once, a CPU's cores do not."""
    return uses_cuda()


def locks_host_memory() -> bool:
    """Whether host memory that a device copies to is page-locked: a rank takes a minute for some tens of GiB."""
    return uses_cuda()


def new_lanes() -> Lanes:
    """For copies between host and device beside what the device computes."""
    return Streams() if uses_cuda() else Lanes()


def fuse_weight_gradients(model: torch.nn.Module) -> None:
    """On a CPU layers add gradients to the buffers as they multiply; on CUDA the layers' config asks for that."""
    if not uses_cuda():
        weight_gradients.fuse(model)


def zero_function() -> Callable[[torch.Tensor], object]:
    """What writes zeros over bytes that torch's allocator has just given."""
    return torch.Tensor.zero_ if uses_cuda() else fresh_pages.zero


def rounded_rows(dtype: torch.dtype) -> Callable[[int], int]:
    """How many rows, at least those there are, a matrix product of this type is best given."""
    return repeated if not uses_cuda() and compiles_for_shapes(dtype) else int


def join_world(backend: str, timeout: timedelta) -> None:
    """Make the group of all ranks, through the store of torchrun's agent or, where there is none, of rank 0.

    Without a device_id: with one, messages between pipeline stages would share the one stream of their group, and
    barriers would be NCCL's.
    """
    if not _has_agent_store():
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world_size = torchrun_rank()
    dist.init_process_group(backend, store=_agent_store(timeout), rank=rank, world_size=world_size, timeout=timeout)


def _master_of_several_hosts() -> str | None:
    """None where all ranks lie on this host."""
    alone = _env_int("LOCAL_WORLD_SIZE", 1) == _env_int("WORLD_SIZE", 1)
    return None if alone else os.environ.get("MASTER_ADDR")


def _prepare_diagnosis() -> None:
    """What tells, when a rank crashes or hangs, where it was. Before any process group is made."""
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)  # a crash in native code prints the Python stacks; stderr may be anything
    collectives = Collectives.install()
    if directory := os.environ.get(RECORD_VARIABLE):
        collectives.record_to(Path(directory), torchrun_rank()[0])
    if uses_cuda():  # as torch 2.13's FlightRecorder.hpp and ProcessGroupNCCL.hpp name them
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name of the next, which wins
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _set_default_timeouts(longest_phase_seconds: float) -> timedelta:
    """The time-out of every group that is made later without one, as megatron and vLLM make theirs; and of the world.

    torch 2.13 does not hand on the world's: `new_group` takes 10 minutes with NCCL and 30 with gloo.
    """
    timeout = max(COLLECTIVE_TIMEOUT, timedelta(seconds=longest_phase_seconds) + TIMEOUT_MARGIN)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        replace_in(dist.distributed_c10d, **{name: timeout})
    return timeout


def fresh_store() -> Store:
    """The store of the process group, by a connection that any thread may use, under a prefix that this
    start alone uses: torchrun's outlives restarts. Collective over the world.
    """
    prefix = [os.urandom(8).hex()]
    dist.broadcast_object_list(prefix, src=0, group=dist.group.WORLD)
    store = dist.distributed_c10d._get_default_store()
    own: Store = store.clone()  # type: ignore[attr-defined]  # torch has it, the stub not
    return PrefixStore(f"hybridflow/{prefix[0]}", own)


def first_to_fail() -> bool:
    """Whether no other rank of this run has reported an error yet. Without a store to ask: rank 0's word.

    Never raises: who asks has an error to report, and where the store is gone it had better be reported twice.
    """
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        elif _has_agent_store():  # there before any process group
            store = _agent_store(STORE_TIMEOUT)
        else:
            return torchrun_rank()[0] == 0
        store.set_timeout(STORE_TIMEOUT)  # the group's own is meant for collectives
        place: int = store.add("hybridflow/errors", 1)
        return place == 1
    except Exception:  # the store's host has left, does not answer, or was never there
        return True


def world_group() -> dist.ProcessGroup:
    """The group of all ranks, which `start` has made."""
    group = dist.group.WORLD
    assert group is not None, "there are no process groups yet"
    return group


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed torch on every device, alike on every rank. What must be random draws from a separate generator."""
    torch.manual_seed(seed)


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """The block leaves torch's global generators as it found them."""
    devices = [torch.cuda.current_device()] if uses_cuda() else []
    with torch.random.fork_rng(devices=devices):
        yield


def _single_process_defaults() -> None:
    """Without torchrun the run is a world of one on a free port of this machine."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        if not os.environ.get("MASTER_PORT", "").isdecimal():  # an address, of a service called master
            os.environ["MASTER_PORT"] = str(_free_port())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prepare_imports(platform: PlatformName) -> None:
    """What must stand before megatron-core and vLLM are imported, which warn and read settings as they load.

    Errors: EnvironmentProblem of `choose_platform`.
    """
    choose_platform(platform)
    quiet_libraries()
    if not uses_cuda():
        overlays.prepare()


def quiet_libraries() -> None:
    """Keep what a user of this program cannot act on out of every rank's output."""
    about_cuda = () if uses_cuda() else (".*(CUDA|cuda).*",)  # that there is none is known, and meant
    for message in (
        *about_cuda,
        ".*(Apex|apex|Transformer Engine|transformer_engine).*",  # optional; the README says what they bring
        ".*(is experimental and still under active development|full scope is deprecated).*",  # megatron of itself
        r".*\.grad attribute of a Tensor that is not a leaf.*",  # megatron's distributed optimizer looks at all tensors
        ".*large number of experts.*without fp32 routing.*",  # megatron; a router computes as the family's does
        ".*TensorFloat32 tensor cores.*not enabled.*",  # torch's compiler; the line of kernels says so
    ):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    warnings.filterwarnings("ignore", message=".*torch.distributed.*deprecated.*", category=FutureWarning)
    if not uses_cuda():  # a torch that is built for CUDA looks for it as megatron loads
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _prepare_megatron(seed: int) -> None:
    """Random states and buffers that megatron expects once a process, whatever grids come later."""
    from megatron.core import parallel_state, tensor_parallel

    adapt_megatron()
    tensor_parallel.model_parallel_cuda_manual_seed(seed, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    seed_everything(seed)


def adapt_megatron() -> None:
    """Let every megatron module loaded so far run without CUDA, and norms be computed again; may be called again.

    Call it after importing further megatron modules. Errors: EnvironmentProblem where this is another megatron-core
    than the one in which all this was seen to be necessary and enough, on either device.
    """
    import megatron.core
    from megatron.core import tensor_parallel

    check_version("megatron-core", megatron.core.__version__)
    replace_in(tensor_parallel, CheckpointWithoutOutput=DroppedOutput)  # by which layers compute norms again
    if not uses_cuda():
        overlays.adapt()


@contextlib.contextmanager
def gathers_within(group: dist.ProcessGroup) -> Iterator[None]:
    """Within the block megatron's optimizer set-up compares parameter groups over `group` only.

    megatron-core gathers them over the world, where ranks outside a role's grid do not take part.
    """
    import megatron.core.optimizer as module

    before = module.__dict__["torch"]
    module.__dict__["torch"] = _Overlay(
        before,
        distributed=_Overlay(
            torch.distributed,
            get_world_size=group.size,
            all_gather_object=lambda objects, own: dist.all_gather_object(objects, own, group=group),
        ),
    )
    try:
        yield
    finally:
        module.__dict__["torch"] = before


class _Overlay(types.ModuleType):
    """A module some of whose names are replaced."""

    def __init__(self, module: types.ModuleType, **names: object) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)
