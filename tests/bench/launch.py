"""How long the launcher takes until many hosts are reached, compared and see the master: no torchrun, no training.

    python -m tests.bench.launch --hosts 128

All are this machine, without ssh: what is timed is the launcher, and a process a host that starts, reads and answers.
"""

import argparse
import sys
import time
from pathlib import Path

from hybridflow.launcher.connection import Ssh, Team
from hybridflow.launcher.hostfile import LaunchHost

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=128, help="of 127.0.1.0/24 (default 128)")
    hosts = [LaunchHost(f"127.0.1.{number}", 8) for number in range(1, parser.parse_args().hosts + 1)]
    began = time.monotonic()
    with Team(hosts, sys.executable, Ssh(), lost_after=60.0) as team:
        first = team.connections[0]
        facts = {"do": "facts", "directory": str(ROOT), "code": str(ROOT), "files": [], "lost_after": 60.0}
        found, failures = team.ask(dict.fromkeys(team.connections, facts), "facts", SECONDS)
        assert not failures, failures
        print(f"{len(found)} hosts reached and read in {time.monotonic() - began:.1f} s")
        listening, failures = team.ask({first: {"do": "listen", "port": 0, "token": "bench"}}, "listening", SECONDS)
        assert not failures, failures
        reach = {"do": "reach", "address": "127.0.0.1", "port": listening[first], "token": "bench", "seconds": 30.0}
        found, failures = team.ask(dict.fromkeys(team.connections, reach), "reached", SECONDS)
        assert not failures, failures
        print(f"{len(found)} hosts see the master after {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
