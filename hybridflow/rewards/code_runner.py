"""Runs program.py of the working directory under limits: code_runner.py CPU_SECONDS MEMORY_MIB FILE_MIB NETWORK

Imports nothing of hybridflow. NETWORK: what to do where no namespaces can be made, allow or refuse (status 97). It ends
as the program does. The program's parent is the first process of a PID namespace: all of the namespace ends with that,
and signals do not stop at the program, as many do at a first process.
"""

import ctypes
import os
import resource
import signal
import sys

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1
NO_NAMESPACES = 97
MIB = 1 << 20


def main(cpu_seconds: int, memory_mib: int, file_mib: int, network: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC) != 0:
        if network == "refuse":
            return NO_NAMESPACES
        why = os.strerror(ctypes.get_errno())
        print(f"hybridflow: programs run with the network, no namespaces can be made: {why}", file=sys.stderr)
    first = os.fork()
    if first == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os._exit(run_program(cpu_seconds, memory_mib, file_mib))
    return status_of(first)


def run_program(cpu_seconds: int, memory_mib: int, file_mib: int) -> int:
    """In the namespaces that there are."""
    program = os.fork()
    if program == 0:
        for limit, value in (
            (resource.RLIMIT_CPU, cpu_seconds),
            (resource.RLIMIT_DATA, memory_mib * MIB),
            (resource.RLIMIT_FSIZE, file_mib * MIB),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        # -I: neither variables nor the user's packages; no bytecode is written
        os.execv(sys.executable, [sys.executable, "-I", "-B", "program.py"])
    return status_of(program)


def status_of(process: int) -> int:
    """Once it has ended. Orphans of the namespace are waited for in between."""
    while True:
        ended, status = os.wait()
        if ended == process:
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
