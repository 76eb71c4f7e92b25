"""A headless Chromium, driven by the DevTools protocol through a pipe: no port, and nothing but the standard library.

with Browser(width=390, height=844) as browser:
    browser.open(path)
    assert browser.value("document.title") == "..."

Where there is none the test is skipped and says why; where HYBRIDFLOW_MUST_RUN_BROWSER is 1, as in .ci/run, it fails.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
MUST_RUN = "HYBRIDFLOW_MUST_RUN_BROWSER"
SECONDS = 60  # of anything that a browser is asked
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


def program() -> str:
    """The browser's."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        why = f"there is no browser: none of {', '.join(NAMES)} is in PATH"
        assert os.environ.get(MUST_RUN) != "1", f"{MUST_RUN}=1, and {why}"
        pytest.skip(why)
    return found


class Browser:
    """One page. `errors`: what its console or its script has complained of; `requests`: every address it asked for."""

    def __init__(self, *, width: int, height: int, dark: bool = False) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._view = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._number = 0
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "Browser":
        profile = self._held.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [program(), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._messages, self._session = self._received(), None
        self._held.callback(self._close)
        page = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setDeviceMetricsOverride", **self._view)
        self.ask("Emulation.setEmulatedMedia", features=[self._scheme])
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def _close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the browser and all that it has started
        self._process.wait()

    def open(self, file: Path) -> None:
        """Load a page and wait until its script has run."""
        self.ask("Page.navigate", url=file.resolve().as_uri())
        self._wait_for("Page.loadEventFired")
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def value(self, expression: str) -> Any:
        """Of an expression in the page, by JSON; that of a promise is waited for."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of the first element that matches."""
        box = self.value(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect(); "
            f"return [b.x + b.width / 2, b.y + b.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(taken["data"]))

    # -------------------------------------------------------------------------------------------- the protocol

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages:
            if "id" in answer and answer["id"] == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)
        raise AssertionError("the browser has ended")

    def _wait_for(self, event: str) -> None:
        for message in self._messages:
            self._note(message)
            if "method" in message and message["method"] == event:
                return

    def _note(self, message: dict[str, Any]) -> None:
        given = message["params"] if "params" in message else {}
        match message["method"] if "method" in message else "":
            case "Runtime.exceptionThrown":
                self.errors.append(str(given["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.errors.append(str(given["args"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(given["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])

    def _received(self) -> Iterator[dict[str, Any]]:
        buffer, end = b"", time.monotonic() + SECONDS
        while True:
            *whole, buffer = buffer.split(b"\0")
            for text in whole:
                yield json.loads(text)
                end = time.monotonic() + SECONDS
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser has said nothing for {SECONDS} s"
            read = os.read(self._read, 1 << 20)
            if not read:
                return
            buffer += read
