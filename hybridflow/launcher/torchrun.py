"""How torchrun is started on each host: command and environment, the same for --dry-run and for the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.launcher.arguments import LaunchOptions
from hybridflow.launcher.connection import Message
from hybridflow.launcher.experiment import Experiment
from hybridflow.launcher.hostfile import LaunchHost


@dataclass(frozen=True)
class Torchrun:
    """Of one start. hosts: in the order of their ranks. num_nodes: where others start theirs, of how many."""

    options: LaunchOptions
    experiment: Experiment
    hosts: Sequence[LaunchHost]
    address: str
    port: int
    restarts: int = 0
    first_node: int = 0
    num_nodes: int | None = None

    def command(self, host: LaunchHost) -> list[str]:
        """By torch 2.13's static rendezvous: nobody who does not reach the master begins alone."""
        num_nodes = self.num_nodes or len(self.hosts)
        settings = {
            "--nnodes": num_nodes,
            "--node-rank": self.first_node + self.hosts.index(host),
            "--nproc-per-node": host.slots,
            "--master-addr": self.address,
            "--master-port": self.port,
            "--rdzv-conf": f"timeout={max(1, round(self.options.rdzv_timeout))}",
            "--shutdown-timeout": round(self.experiment.grace_seconds) + 5,
        }
        command = [self.options.python, "-u", "-P", "-m", "torch.distributed.run"]
        return [*command, *(str(word) for setting in settings.items() for word in setting), *self.options.module]

    def environment(self, host: LaunchHost, interface: str | None) -> dict[str, str]:
        """Beside what the host gives every process. interface: by which it reaches the master."""
        given = {**self.experiment.environment, **self.options.environment}
        found = {"OMP_NUM_THREADS": "1"} if host.slots > 1 else {}  # as torchrun has it, which warns of it
        if interface is not None and (self.num_nodes or len(self.hosts)) > 1:
            found["GLOO_SOCKET_IFNAME"] = interface  # by itself gloo takes the one that the host's name stands for
        if self.num_nodes is None:
            found["HYBRIDFLOW_HOSTS"] = ",".join(f"{each.name}={each.slots}" for each in self.hosts)
        found["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # each rank warns of how it binds memory, and of addresses without names
        found |= {"HYBRIDFLOW_HOST": host.name, "HYBRIDFLOW_RESTARTS": str(self.restarts), "PYTHONUNBUFFERED": "1"}
        found["PYTHONIOENCODING"] = "utf-8:backslashreplace"  # as this side reads it, whatever the host's locale says
        return found | given

    def start(self, host: LaunchHost, interface: str | None) -> Message:
        """The request to hybridflow/launcher/node.py."""
        return {
            "do": "start",
            "argv": self.command(host),
            "env": self.environment(host, interface),
            "directory": str(self.options.directory),
            "grace": self.experiment.grace_seconds,
        }

    def offset(self, host: LaunchHost) -> int:
        """The first rank of the host."""
        if self.num_nodes is not None:  # all have as many as this one
            return self.first_node * host.slots
        return sum(each.slots for each in self.hosts[: self.hosts.index(host)])
