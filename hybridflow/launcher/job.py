"""A job from hostfile to exit status: reach the hosts, compare them, start torchrun, watch it, start again.

All hosts need the same code and versions, and the same GPUs: at least one for each slot. This is compared before
anything starts.
"""

from __future__ import annotations

import ipaddress
import secrets
import shlex
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.launcher.arguments import DEFAULT_PORT, RESTARTS_WITH_SPARES, ROOT, LaunchOptions
from hybridflow.launcher.attempt import Failure, run_attempt
from hybridflow.launcher.connection import Connection, Message, Ssh, Team, command_of, is_local
from hybridflow.launcher.experiment import Experiment, experiment_on
from hybridflow.launcher.here import run_here
from hybridflow.launcher.hostfile import LaunchError, LaunchHost, choose_hosts, read_hostfile
from hybridflow.launcher.output import say
from hybridflow.launcher.torchrun import Torchrun

FACTS_SECONDS = 60.0  # beyond those to connect: a cold file system
NEEDED = ("torch", "megatron-core", "vllm")
Facts = Mapping[str, Any]  # of a host, as hybridflow/launcher/node.py tells them


def run(options: LaunchOptions) -> int:
    """The exit status: 0, that of the first rank to fail, or 1. Errors: LaunchError before ranks have started."""
    if options.no_ssh:
        return run_here(options)
    assert options.hostfile is not None, "it is an error of the arguments"
    hosts = choose_hosts(read_hostfile(options.hostfile), options.include, options.exclude)
    least, most = options.nnodes or (len(hosts), len(hosts))
    if len(hosts) < least:
        names = ", ".join(host.name for host in hosts)
        raise LaunchError(
            f"--nnodes asks for {least} hosts, {options.hostfile} and the filters leave {len(hosts)}: {names}"
        )
    if options.dry_run:
        dry_run(options, hosts[:most], least)
        return 0
    return Job(options, hosts, least, most).run()


class Job:
    """hosts: those of the hostfile, the first of which are used; the others are spares."""

    def __init__(self, options: LaunchOptions, hosts: Sequence[LaunchHost], least: int, most: int) -> None:
        self._options, self._hosts, self._least, self._most = options, hosts, least, most
        self._ssh = Ssh(options.connect_timeout, options.ssh_config, options.ssh_options)
        self._restarts = RESTARTS_WITH_SPARES if least < len(hosts) else 0
        if options.max_restarts is not None:
            self._restarts = options.max_restarts

    def run(self) -> int:
        options = self._options
        experiment = self._experiment(self._hosts[: self._most])  # reports a bad config before hosts are asked
        with Team(self._hosts, options.python, self._ssh, lost_after=options.lost_after) as team:
            self._compare(team, experiment)
            for restart in range(self._restarts + 1):
                connections = self._chosen(team)
                if restart or [each.host for each in connections] != list(self._hosts[: len(connections)]):
                    experiment = self._experiment([each.host for each in connections])
                connections = connections[: experiment.num_hosts]
                try:
                    failure, was_stopped = self._start(team, connections, experiment, restart)
                except LaunchError as error:
                    if restart == self._restarts or all(each.lost is None for each in connections):
                        raise
                    say(f"{error}\nrestart {restart + 1} of {self._restarts}, without it", error=True)
                    continue
                if failure is None or was_stopped or failure.is_stop or restart == self._restarts:
                    break
                say(f"{failure}: restart {restart + 1} of {self._restarts}", error=True)
        return 0 if failure is None else failure.status

    def _experiment(self, hosts: Sequence[LaunchHost]) -> Experiment:
        return experiment_on(self._options, hosts, min(self._least, len(hosts)))

    def _compare(self, team: Team, experiment: Experiment) -> None:
        """All hosts at once. Errors: LaunchError with a line for each that is not reached, and each difference."""
        options = self._options
        say(f"reaching {names_of(self._hosts)}")
        answers, failures = team.ask(
            dict.fromkeys(team.connections, facts_request(options, experiment.base)),
            "facts",
            options.connect_timeout + FACTS_SECONDS,
        )
        lines = [not_reached(connection, why, options) for connection, why in failures.items()]
        if len(answers) < self._least:
            raise LaunchError("\n".join(lines))
        for connection, line in zip(failures, lines, strict=True):
            say(f"warning: the run continues without {connection.host}: {line}", error=True)
            connection.lost = failures[connection]
            connection.give_up()
        facts = {connection.host: answer for connection, answer in answers.items()}
        check_alike(options, experiment, facts)
        self._facts = facts
        say("code, versions and files are the same on all of them")

    def _chosen(self, team: Team) -> list[Connection]:
        """The first of those that are there. Errors: LaunchError where they are too few."""
        usable = team.usable
        if len(usable) < self._least:
            lost = "; ".join(f"{each.host}: {each.lost}" for each in team.connections if each.lost is not None)
            raise LaunchError(f"{len(usable)} hosts are left, --nnodes asks for {self._least}: {lost}")
        return usable[: self._most]

    def _start(
        self, team: Team, connections: Sequence[Connection], experiment: Experiment, restart: int
    ) -> tuple[Failure | None, bool]:
        options, hosts = self._options, [connection.host for connection in connections]
        address, port, interfaces = self._rendezvous(team, connections)
        torchrun = Torchrun(options, experiment, hosts, address, port, restarts=restart)
        num_ranks = sum(host.slots for host in hosts)
        say(f"{num_ranks} ranks on {names_of(hosts)}; master {address} port {port}")
        if not restart and experiment.placement:
            say(experiment.placement)
        starts = {each: torchrun.start(each.host, interfaces[each]) for each in connections}
        offsets = {each: torchrun.offset(each.host) for each in connections}
        return run_attempt(team, starts, offsets, experiment, stays=experiment.goes_on(restart))

    def _rendezvous(
        self, team: Team, connections: Sequence[Connection]
    ) -> tuple[str, int, dict[Connection, str | None]]:
        """Address and port of the master, which every host has reached, and by which interface each does.

        Errors: LaunchError that names the hosts which do not, and the address.
        """
        options, first = self._options, connections[0]
        token = secrets.token_hex(8)
        port = options.master_port or DEFAULT_PORT
        answers, failures = team.ask({first: {"do": "listen", "port": port, "token": token}}, "listening", 30.0)
        if failures and options.master_port is None:
            answers, failures = team.ask({first: {"do": "listen", "port": 0, "token": token}}, "listening", 30.0)
        if failures:
            raise LaunchError(f"{first.host}: --master-port {port}: {failures[first]}")
        port, address = answers[first], self._address(connections)
        request = {"do": "reach", "address": address, "port": port, "token": token, "seconds": options.rdzv_timeout}
        reached, failures = team.ask(dict.fromkeys(connections, request), "reached", options.rdzv_timeout + 10)
        if failures:
            why = [
                f"{each.host} cannot reach the master {first.host} at {address} port {port}: {text}"
                for each, text in failures.items()
            ]
            raise LaunchError(
                "\n".join([*why, "--master-addr names another address of it, --master-port another port"])
            )
        return address, port, reached

    def _address(self, connections: Sequence[Connection]) -> str:
        """Of the first host, for the others: the address that the name stands for, else the one that ssh has found."""
        first, *others = connections
        known = known_address(self._options, [connection.host for connection in connections])
        if known is not None:
            return known
        if not first.is_local:
            return str(self._facts[first.host]["addresses"][1])
        seen = [self._facts[other.host]["addresses"][0] for other in others if not other.is_local]
        return str(seen[0]) if seen else "127.0.0.1"


# ------------------------------------------------------------------------------------------------ before a start


def facts_request(options: LaunchOptions, base: str | None) -> Message:
    """base: the file that the config builds on."""
    files = [file for file in (options.config, base) if file is not None]
    return {
        "do": "facts",
        "directory": str(options.directory),
        "code": str(ROOT),
        "files": files,
        "lost_after": options.lost_after,
    }


def check_alike(options: LaunchOptions, experiment: Experiment, facts: Mapping[LaunchHost, Facts]) -> None:
    """Errors: LaunchError with all that differs."""
    lines = missing(facts, options.python, NEEDED) + differences(facts)
    if not options.allow_unlike_gpus:
        lines += unlike_gpus(facts)
    if not experiment.computes_on_cpu:
        lines += too_few_gpus(facts)
    if lines:
        raise LaunchError("\n".join(lines))


def differences(found: Mapping[LaunchHost, Facts]) -> list[str]:
    """A line for each thing that has to be alike and is not, with which host has what."""
    names = dict.fromkeys(name for facts in found.values() for name in facts["alike"])
    lines = []
    for name in names:
        values = {host: facts["alike"].get(name, "none") for host, facts in found.items()}
        if len(set(values.values())) == 1:
            continue
        if name == "the code of hybridflow":
            values = {host: f"{value}{_revision(found[host])}" for host, value in values.items()}
        lines.append(f"{name} differs: {_by_value(values)}")
    return lines


def missing(found: Mapping[LaunchHost, Facts], python: str, packages: Sequence[str]) -> list[str]:
    """A line for each package that the ranks need and no host has: where one has it, `differences` tells."""
    lines = []
    for package in packages:
        if all(facts["alike"].get(package, "none") == "none" for facts in found.values()):
            lines.append(f"{package} is not installed for {python}: `bash launch/setup.sh` installs it")
    return lines


def unlike_gpus(found: Mapping[LaunchHost, Facts]) -> list[str]:
    """A line where hosts have other GPUs than others."""
    kinds = {host: _gpus(facts["gpus"]) for host, facts in found.items()}
    if len(set(kinds.values())) < 2:
        return []
    return [f"GPUs differ: {_by_value(kinds)}; --allow-unlike-gpus starts all the same"]


def too_few_gpus(found: Mapping[LaunchHost, Facts]) -> list[str]:
    """A line for each host with more slots than GPUs. Hosts without any are left to the config's platform."""
    return [
        f"{host}: slots={host.slots}, but it has {len(facts['gpus'])} GPUs: each rank needs its own"
        for host, facts in found.items()
        if facts["gpus"] and host.slots > len(facts["gpus"])
    ]


def _revision(facts: Facts) -> str:
    return f" (git {facts['revision']})" if facts["revision"] else ""


def _gpus(names: Sequence[str]) -> str:
    counted = [f"{count} x {name}" for name, count in Counter(names).items()]
    return " and ".join(counted) or "none"


def _by_value(values: Mapping[LaunchHost, str]) -> str:
    """`2.13.0 on a, b; 2.11.0 on c`"""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host.name)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())


def known_address(options: LaunchOptions, hosts: Sequence[LaunchHost]) -> str | None:
    """Of the first host, as far as this machine can tell without a word to it; None where it cannot."""
    if options.master_addr is not None:
        return options.master_addr
    if len(hosts) == 1:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(hosts[0].name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a name of ssh's config
        return None
    addresses = [str(address[4][0]) for address in found]
    return next((each for each in addresses if not ipaddress.ip_address(each.partition("%")[0]).is_loopback), None)


def not_reached(connection: Connection, why: str, options: LaunchOptions) -> str:
    """With what to try where it is ssh that failed."""
    if connection.is_local or connection.lost is None:
        return f"{connection.host}: {why}"
    if f"{options.python}: No such file" in why:  # as the host's shell says it
        return f"{connection.host}: --python {options.python}: is not there"
    ssh = shlex.join(
        Ssh(options.connect_timeout, options.ssh_config, options.ssh_options).command(connection.host, "true")
    )
    return f"{connection.host}: {why}; try: {ssh}"


def dry_run(options: LaunchOptions, hosts: Sequence[LaunchHost], least: int) -> None:
    """Print what would be started where."""
    experiment = experiment_on(options, hosts, least)
    hosts = hosts[: experiment.num_hosts]
    address = known_address(options, hosts) or f"(the address by which ssh reaches {hosts[0]})"
    port = options.master_port or DEFAULT_PORT
    torchrun = Torchrun(options, experiment, hosts, address, port)
    if experiment.placement:
        print(f"{experiment.placement}\n")
    ssh = Ssh(options.connect_timeout, options.ssh_config, options.ssh_options)
    for host in hosts:
        variables = [f"{name}={shlex.quote(value)}" for name, value in torchrun.environment(host, None).items()]
        reached = command_of(host, options.python, None if is_local(host) else ssh)
        print(f"{host}: reached by: {shlex.join(reached)}")
        print(f"{host}: in {options.directory}: {' '.join(variables)} {shlex.join(torchrun.command(host))}")
    print(f"GLOO_SOCKET_IFNAME, where it is not given, is the interface by which a host reaches {address}.")
    if options.master_port is None:
        print(f"Where port {port} of {hosts[0]} is taken, another one is found.")


def names_of(hosts: Sequence[LaunchHost]) -> str:
    return ", ".join(host.name for host in hosts)
