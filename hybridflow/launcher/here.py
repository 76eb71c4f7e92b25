"""--no-ssh: the ranks of one node, where a scheduler (Slurm, Kubernetes) starts this same command on every node."""

from __future__ import annotations

import contextlib
import shlex
import socket
import time

from hybridflow.launcher.arguments import DEFAULT_PORT, NODE_RANK_FROM, NUM_NODES_FROM, LaunchOptions, found
from hybridflow.launcher.attempt import run_attempt
from hybridflow.launcher.connection import Ssh, Team, is_local
from hybridflow.launcher.experiment import experiment_on
from hybridflow.launcher.hostfile import LaunchError, LaunchHost, choose_hosts, read_hostfile
from hybridflow.launcher.node import GPUS, interface_of, output_of
from hybridflow.launcher.output import say
from hybridflow.launcher.torchrun import Torchrun


def run_here(options: LaunchOptions) -> int:
    """The ranks of this node alone: a scheduler starts the same command on every node."""
    host, num_nodes, node_rank = this_node(options)
    if num_nodes > 1 and options.master_addr is None:
        raise LaunchError("--no-ssh: --master-addr, the address of node 0, is missing")
    nodes = [LaunchHost(f"node-{i}", host.slots) for i in range(num_nodes)]
    experiment = experiment_on(options, nodes, num_nodes)
    address, port = options.master_addr or "127.0.0.1", options.master_port or DEFAULT_PORT
    torchrun = Torchrun(
        options, experiment, [host], address, port, restarts=0, first_node=node_rank, num_nodes=num_nodes
    )
    if options.dry_run:
        say(experiment.placement)
        print(shlex.join(torchrun.command(host)))
        return 0
    with Team([host], options.python, Ssh(), lost_after=options.lost_after, whole_environment=True) as team:
        [connection] = team.connections
        interface = None
        if num_nodes > 1:
            wait_for_name(address, node_rank, options.rdzv_timeout)
        if node_rank:
            request = {"do": "reach", "address": address, "port": port, "token": "", "seconds": options.rdzv_timeout}
            answers, failures = team.ask({connection: request}, "reached", options.rdzv_timeout + 10)
            if failures:
                text = f"node {node_rank}, {host}, cannot reach the master at {address} port {port}"
                raise LaunchError(f"{text} within {options.rdzv_timeout:g} s: {failures[connection]}")
            interface = answers[connection]
        elif num_nodes > 1:
            interface = own_interface(address)
        starts, offsets = {connection: torchrun.start(host, interface)}, {connection: torchrun.offset(host)}
        failure, _ = run_attempt(team, starts, offsets, experiment, stays=experiment.goes_on(0) or node_rank > 0)
    return 0 if failure is None else failure.status


def this_node(options: LaunchOptions) -> tuple[LaunchHost, int, int]:
    """(this node, the number of nodes, this node's number) as given, or as hostfile or scheduler say.

    Errors: LaunchError that says what is missing.
    """
    if options.hostfile is not None:
        hosts = choose_hosts(read_hostfile(options.hostfile), options.include, options.exclude)
        own = (
            options.node_rank
            if options.node_rank is not None
            else next((i for i, host in enumerate(hosts) if is_local(host)), None)
        )
        if own is None or own >= len(hosts):
            raise LaunchError(f"--no-ssh: {options.hostfile} names no host that is this machine; give --node-rank")
        return hosts[own], len(hosts), own
    num_nodes = options.nnodes[1] if options.nnodes is not None else found(NUM_NODES_FROM) or 1
    node_rank = options.node_rank if options.node_rank is not None else found(NODE_RANK_FROM)
    if node_rank is None and num_nodes > 1:
        names = ", ".join(NODE_RANK_FROM)
        raise LaunchError(f"--no-ssh: which of the {num_nodes} nodes is this? Give --node-rank, or one of {names}")
    if (node_rank or 0) >= num_nodes:
        raise LaunchError(f"--node-rank {node_rank}: nodes are numbered from 0, and there are {num_nodes}")
    slots = options.nproc_per_node or len(output_of(GPUS).splitlines())
    if not slots:
        raise LaunchError("--no-ssh: --nproc-per-node, the ranks of a node, is missing, and no GPUs are found to count")
    return LaunchHost(socket.gethostname(), slots), num_nodes, node_rank or 0


def wait_for_name(address: str, node_rank: int, seconds: float) -> None:
    """Until this host knows the address of the master: DNS has a pod's name only some seconds after the pod's start.

    Errors: LaunchError where it does not within so long.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > until:
                raise LaunchError(
                    f"node {node_rank}, {socket.gethostname()}: the first host's name {address} does not resolve "
                    f"within {seconds:g} s ({error}). Every node needs the name in DNS or /etc/hosts. Otherwise give "
                    "--master-addr an IP address"
                ) from error
            time.sleep(1)


def own_interface(address: str) -> str | None:
    """Of this node, the master, whose address this is."""
    with contextlib.suppress(OSError, UnicodeError):
        for *_, found_address in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM):
            interface = interface_of(str(found_address[0]))
            if interface is not None:
                return interface
    return None
