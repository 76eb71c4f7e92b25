"""What torchrun and the launcher tell a rank by variables and a store, before any process group exists."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.ranks import counted

OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STORE_TIMEOUT = timedelta(seconds=30)


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agent_store(timeout: timedelta) -> PrefixStore:
    """That of torchrun, by keys that no other start has.

    torch 2.13 takes it that each restart has a new store. With a static rendezvous, that of --master-addr, it has the
    one before, and the ranks would go to the addresses that it has of ranks which are gone.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(f"hybridflow/start_{_env_int('TORCHELASTIC_RESTART_COUNT', 0)}", store)


BY_COMMAND = "HYBRIDFLOW_BY_COMMAND"  # set for ranks that `hybridflow train` has started


def is_rank() -> bool:
    """Whether torchrun, or `hybridflow train`, has started this process as a rank."""
    return "RANK" in os.environ


def forget_world_of_one() -> None:
    """A pod or a debugger may have set RANK=0 and WORLD_SIZE=1, without a launcher: this process is no rank then."""
    if is_rank() and not _has_launcher() and _env_int("WORLD_SIZE", 1) == 1:
        for name in OF_A_RANK:
            os.environ.pop(name, None)


def check_rank(nproc: int | None) -> None:
    """Whether this process may be the rank that the environment says. nproc: what --nproc says.

    Errors: EnvironmentProblem where that contradicts --nproc, or says too little.
    """
    rank, world_size = torchrun_rank()
    found = f"RANK = {rank} and WORLD_SIZE = {world_size} are set in the environment"
    unset = "if they are left over, unset them: env -u RANK -u WORLD_SIZE -u LOCAL_RANK hybridflow train ..."
    if nproc is not None and (nproc != world_size or not _has_launcher()):
        raise EnvironmentProblem(f"--nproc {nproc}: {found}: a rank starts no ranks. Leave --nproc out, or {unset}")
    if world_size > 1 and "MASTER_ADDR" not in os.environ:
        raise EnvironmentProblem(f"{found}, and MASTER_ADDR is not: a rank cannot find the others; {unset}")


def _has_launcher() -> bool:
    """Whether torchrun, or what does the same, has set the variables of a rank: a pod alone has no ranks."""
    return "LOCAL_RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def is_by_command() -> bool:
    """Whether `hybridflow train` watches this rank and tells the rank's error."""
    return os.environ.get(BY_COMMAND) == "1"


def error_file() -> str | None:
    """Where the agent that has started this rank looks for the rank's error."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") or None


def torchrun_rank() -> tuple[int, int]:
    """(rank, world size) as torchrun tells them, before any process group exists."""
    return _env_int("RANK", 0), _env_int("WORLD_SIZE", 1)


@dataclass(frozen=True)
class Started:
    """Where torchrun has started this process; a process without it is the one rank of one host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int  # torchrun's group rank: a host is what one agent has started

    @property
    def ranks_here(self) -> range:
        """Of this host."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def started() -> Started:
    """As torchrun tells it, before any process group exists."""
    rank, world_size = torchrun_rank()
    local_world_size = _env_int("LOCAL_WORLD_SIZE", 1)
    node = _env_int("GROUP_RANK", rank // local_world_size)
    return Started(rank, world_size, _env_int("LOCAL_RANK", 0), local_world_size, node)


def host_name() -> str:
    """What people call this host: as the launcher names it, else as it names itself."""
    return os.environ.get("HYBRIDFLOW_HOST") or socket.gethostname()


def meeting_store(timeout: timedelta) -> Store:
    """A store that all ranks see, before any process group exists and without one; alone, one of this process.

    Every call of a process gets separate keys: ranks that call it equally often meet. Errors: EnvironmentProblem
    where the store's host cannot be reached.
    """
    rank, world_size = torchrun_rank()
    if "RANK" not in os.environ:
        return HashStore()
    try:
        store = _agent_store(timeout)
        return PrefixStore(f"meeting_{store.add(f'meetings/{rank}', 1)}", store)
    except (dist.DistError, RuntimeError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise EnvironmentProblem(
            f"rank {rank} on {host_name()} cannot reach the store of {counted(world_size)} at {address}: {error}. Let "
            "MASTER_ADDR and MASTER_PORT name a host and port that every host reaches"
        ) from error


def restart_count() -> int:
    """How often torchrun, or launch/run.py, has restarted the ranks since it was started."""
    return _env_int("TORCHELASTIC_RESTART_COUNT", 0) + _env_int("HYBRIDFLOW_RESTARTS", 0)


def hosts_of_ranks() -> str:
    """`NAME=RANKS,...` in the order of the ranks: as launch/run.py tells, else torchrun's nodes, alike in size.

    Where they are not alike, and nobody tells, all ranks count as of one host.
    """
    hosts = os.environ.get("HYBRIDFLOW_HOSTS")
    if hosts is not None:
        return hosts
    _, world_size = torchrun_rank()
    num_nodes = _env_int("GROUP_WORLD_SIZE", 1)  # not LOCAL_WORLD_SIZE: vLLM 0.32.0 overwrites that
    if num_nodes < 1 or world_size % num_nodes:
        num_nodes = 1
    return ",".join(f"node {i}={world_size // num_nodes}" for i in range(num_nodes))


def set_environment(variables: Mapping[str, str]) -> None:
    """Variables that libraries read when they are loaded or join a group. What is set already stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _env_int(name: str, default: int) -> int:
    return int(os.environ.get(name, default))
