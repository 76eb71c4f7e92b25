"""Proxies of the environment: this machine's servers are reached without them, by the clients that people use."""

import asyncio
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from hybridflow.parallel.proxies import is_loopback, keep_loopback_direct
from hybridflow.rewards.remote import _client, json_score
from tests.launch import free_port, of_no_rank

pytestmark = pytest.mark.slow  # waits for processes

ASKS = """
import asyncio, os, sys, urllib.request
import aiohttp, httpx, requests
from hybridflow.parallel.proxies import keep_loopback_direct

keep_loopback_direct()
url = sys.argv[1]

async def by_aiohttp():
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with session.get(url) as reply:
            return await reply.text()

by_urllib = urllib.request.urlopen(url).read().decode()
print(httpx.get(url).text, requests.get(url).text, by_urllib, asyncio.run(by_aiohttp()))
"""


class Scores(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"0.25")

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server of this machine that answers everything with 0.25."""
    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), Scores) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        for key in (name, name.upper()):
            monkeypatch.setenv(key, "")  # what the test puts there is gone after it
            monkeypatch.delenv(key)
    return monkeypatch


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_clients_reach_this_machine_past_a_proxy(name: str, host: str, port: int) -> None:
    proxy = {name: f"http://127.0.0.1:{free_port()}", "no_proxy": "example.com"}  # nobody listens there
    command = [sys.executable, "-c", ASKS, f"http://{host}:{port}/score"]
    done = subprocess.run(command, env=of_no_rank(**proxy), capture_output=True, text=True, check=False)
    assert done.stdout == "0.25 0.25 0.25 0.25\n", done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1"])  # Debian's address of its own name
def test_a_reward_service_of_this_machine_is_asked_past_a_proxy(
    host: str, port: int, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    _client.cache_clear()
    url = f"http://{host}:{port}/"
    scores = json_score(["p"], ["r"], {}, url=url, request_seconds=30, retries=0, backoff_seconds=0)
    assert asyncio.run(scores) == [0.25]
    _client.cache_clear()


def test_what_no_proxy_says_stays(environment: pytest.MonkeyPatch) -> None:
    keep_loopback_direct()
    assert "no_proxy" not in os.environ and "NO_PROXY" not in os.environ, "without a proxy nothing changes"
    environment.setenv("HTTPS_PROXY", "http://proxy:3128")
    environment.setenv("no_proxy", "example.com, 127.0.0.1")
    environment.setenv("NO_PROXY", "10.0.0.0/8")
    keep_loopback_direct("10.0.0.7")
    expected = "example.com,127.0.0.1,10.0.0.0/8,localhost,::1,0.0.0.0,10.0.0.7"
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == expected
    environment.setenv("no_proxy", "*")
    environment.delenv("NO_PROXY")
    keep_loopback_direct()
    assert os.environ["no_proxy"] == "*"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.1.1:8000/v1", True),
        ("http://[::1]:8000", True),
        ("https://LOCALHOST", True),
        ("http://10.0.0.7:80", False),
        ("http://localhost.example.com", False),
        ("http://127.0.0.1.example.com", False),
        ("nothing", False),
    ],
)
def test_urls_of_this_machine(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected
