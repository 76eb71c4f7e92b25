"""What a config says that the launcher has to know. It is read where everything else reads it, in hybridflow.plan, by
the Python of the ranks: the launcher itself needs nothing but the standard library."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hybridflow.launcher.arguments import LaunchOptions
from hybridflow.launcher.hostfile import LaunchError, LaunchHost
from hybridflow.launcher.output import say


@dataclass(frozen=True)
class Experiment:
    """A config on hosts, or a health check without one.

    run_dir: where the logs go. loads_own: whether it goes on with the run that is there. num_hosts: the most of the
    given hosts on which it can run. unfit: why it cannot, by the numbers of hosts on which it cannot. placement: which
    grid lies on which host, for people. base: the file that the config builds on.
    """

    num_hosts: int
    run_dir: Path | None = None
    loads_own: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_seconds: float = 10.0
    computes_on_cpu: bool = False
    unfit: Mapping[int, str] = field(default_factory=dict)
    placement: str = ""
    base: str | None = None

    def goes_on(self, restart: int) -> bool:
        """Whether the run's directory will be the one that is there."""
        if self.run_dir is None or not (self.loads_own or restart):
            return False
        return any((self.run_dir / "checkpoints").glob("step_*"))


def experiment_on(options: LaunchOptions, hosts: Sequence[LaunchHost], least: int) -> Experiment:
    """What is asked for, on these hosts: on `least` of them or more. Errors: LaunchError."""
    if options.config is None:
        return Experiment(len(hosts))
    read = read_experiment(
        options.config,
        options.overrides,
        hosts,
        least,
        python=options.python,
        directory=options.directory,
        environment=options.environment,
    )
    for count, why in read.unfit.items():
        say(f"warning: the run does not fit {count} of the hosts: {why}", error=True)
    if options.health:  # it writes no run, and has nothing to save
        return replace(read, run_dir=None, grace_seconds=10.0)
    return read


def read_experiment(
    config: str,
    overrides: Sequence[str],
    hosts: Sequence[LaunchHost],
    least: int,
    *,
    python: str,
    directory: Path,
    environment: Mapping[str, str],
) -> Experiment:
    """The config on the first hosts, `least` of them or more. Errors: LaunchError, in the words of hybridflow.plan."""
    slots = ",".join(f"{host.name}={host.slots}" for host in hosts)
    command = [python, "-m", "hybridflow.plan", config, *overrides, "--hosts", slots, "--least-hosts", str(least)]
    try:
        done = subprocess.run(
            [*command, "--for-launch"],
            cwd=directory,
            env={**os.environ, **environment, "PYTHONIOENCODING": "utf-8:backslashreplace"},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise LaunchError(f"--python {python}: cannot be started: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        ours = [line.removeprefix("hybridflow.plan: error: ") for line in lines if line.startswith("hybridflow.plan:")]
        raise LaunchError("\n".join(ours) or f"{python} -m hybridflow.plan failed:\n" + "\n".join(lines[-5:]))
    read = json.loads(done.stdout)
    return Experiment(
        run_dir=directory / read["run_dir"],
        loads_own=read["loads_own"],
        environment=read["environment"],
        grace_seconds=read["grace_seconds"],
        computes_on_cpu=read["computes_on_cpu"],
        num_hosts=read["num_hosts"],
        unfit={int(count): reason for count, reason in read["unfit"].items()},
        placement=read["placement"],
        base=read["base"],
    )
