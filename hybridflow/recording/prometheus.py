"""The metrics of the last iteration as Prometheus text (format 0.0.4), which rank 0 serves under an optional port.

curl http://127.0.0.1:9400/metrics

# TYPE hybridflow_reward_score_mean gauge
hybridflow_reward_score_mean{run="math"} 0.812
"""

import math
import re
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from hybridflow.config import MetricsConfig
from hybridflow.errors import EnvironmentProblem

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def prometheus_text(run: str, values: Mapping[str, float]) -> str:
    """A gauge for each metric; what a name may not have becomes an underscore."""
    label = run.translate(ESCAPED)
    named = {"hybridflow_" + re.sub(r"[^a-zA-Z0-9_]", "_", name): value for name, value in values.items()}
    return "".join(f'# TYPE {name} gauge\n{name}{{run="{label}"}} {_shown(value)}\n' for name, value in named.items())


def _shown(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class PrometheusServer:
    """A daemon thread answers, and training waits for nobody. Errors: EnvironmentProblem where the port is taken."""

    def __init__(self, run: str, metrics: MetricsConfig) -> None:
        assert metrics.prometheus_port is not None, "metrics are served under a port"
        self._run, self._text = run, ""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] in ("/", "/metrics")
                body = owner._text.encode() if found else b""
                self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: a scrape is no event of the run."""

        address, port = metrics.prometheus_address, metrics.prometheus_port
        try:
            self._server = ThreadingHTTPServer((address, port), Handler)
        except OSError as error:
            raise EnvironmentProblem(
                f"metrics.prometheus_port = {port}: cannot be opened on {address}: {error.strerror}"
            ) from error
        Thread(target=self._server.serve_forever, name="hybridflow prometheus", daemon=True).start()

    def write(self, iteration: int, values: dict[str, float]) -> None:
        self._text = prometheus_text(self._run, {"iteration": float(iteration), **values})

    def sync(self) -> None:
        """Only metrics.csv is read back."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
