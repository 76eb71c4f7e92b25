"""Proxies of the environment, which this machine's traffic with itself does not take.

Where HTTP_PROXY is set, clients of OpenAI, httpx, requests and urllib ask the proxy also for 127.0.0.1: a server of a
rank, a reward service of the same host. no_proxy names what is reached without one; child processes inherit it.
"""

import ipaddress
import os
from urllib.parse import urlsplit

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def keep_loopback_direct(*more: str) -> None:
    """Add the names of this machine to no_proxy, where there is a proxy. more: addresses that it listens at."""
    if not any(os.environ.get(name) for proxy in PROXIES for name in (proxy, proxy.upper())):
        return
    known = [name for key in ("no_proxy", "NO_PROXY") for name in os.environ.get(key, "").split(",")]
    names = dict.fromkeys(name.strip() for name in (*known, *LOOPBACK, *more) if name.strip())
    if "*" not in names:  # nothing takes a proxy: some clients know the star only where it stands alone
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(names)


def is_loopback(url: str) -> bool:
    """Whether the host of a URL is this machine by the loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
