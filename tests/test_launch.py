"""The launcher of the distributed tests: a hang ends, and says where every rank stood; a failure ends all ranks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forks import run_forks
from tests.launch import finish, start_torchrun

WAITING = """
import os, pathlib, sys, time

def rank_waits_here():
    pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {hash('a')}")
    time.sleep(6000)

rank_waits_here()
"""

pytestmark = pytest.mark.distributed


