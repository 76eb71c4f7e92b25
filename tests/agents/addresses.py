"""Addresses of this host that are not loopback, at which a door may be listened at."""

import socket

OUTSIDE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}  # of documentation: nobody has them


def own_address(family: socket.AddressFamily = socket.AF_INET) -> str | None:
    """From which this host would reach others; None where it would reach nobody. Nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((OUTSIDE[family], 9))
            return probe.getsockname()[0]
    except OSError:
        return None
