"""gloo's process groups with one thread each, over the network interfaces that torch would take.

torch 2.13 gives a group two threads, and both write into one status, without a lock, the name of the collective that
they have ended. A name of over 15 characters is on the heap, and freed twice where two such collectives end at once:
two ranks that had six gathers of ZeRO-1 under way, as megatron coalesces them, died within 2,000 rounds of them, or
20,000. With one thread a group's collectives run in the order of their calls.

A group whose threads are given makes no devices. So ours are made as torch's are: of the interfaces that
GLOO_SOCKET_IFNAME names, else of the address that the host's name stands for. Where the host alone has that address
(Debian and Ubuntu write 127.0.1.1), ranks of several hosts would wait for each other without end. There the device is
of the address by which this host reaches the master.
"""

import ipaddress
import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo, Store

ELSEWHERE = "192.0.2.1"  # of documentation (RFC 5737): on no host, and nothing is sent there

_Gloo: Any = ProcessGroupGloo  # torch's stub has other names than torch
_init = _Gloo.__init__


def use_one_thread(interfaces: str = "", master: str | None = None) -> None:
    """In every group that is made in this process from now on.

    interfaces: what GLOO_SOCKET_IFNAME says. master: where ranks lie on several hosts, the one that all of them reach.
    """

    def init(group: Any, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = _Gloo._Options()
        options._devices = _devices(interfaces, master)
        options._threads = 1
        options._timeout = timeout
        _init(group, store, rank, size, options)

    _Gloo.__init__ = init


def _devices(interfaces: str, master: str | None) -> list[Any]:
    """Errors: RuntimeError, torch's own, where an interface is not there."""
    if len(interfaces) > 1:  # as torch has it
        return [_Gloo.create_device(interface=name) for name in interfaces.split(",")]
    address = None
    if master is not None and _is_loopback(socket.gethostname()):
        address = _own_address(master)
    return [_Gloo.create_default_device() if address is None else _Gloo.create_device(hostname=address)]


def _own_address(master: str) -> str | None:
    """The address of this host on the way to the master, or on the way out; None where there is none."""
    for target in (master, ELSEWHERE):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as way:
                way.connect(address)  # a datagram socket: the route is looked up, nothing is sent
                own: str = way.getsockname()[0]
        except OSError:
            continue
        if not _is_loopback(own):
            return own
    return None


def _is_loopback(host: str) -> bool:
    """Whether the host's first address is of the loopback interface. A name without an address is not."""
    try:
        return ipaddress.ip_address(str(socket.getaddrinfo(host, None)[0][4][0])).is_loopback
    except OSError:
        return False
