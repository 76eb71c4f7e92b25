"""What of the HuggingFace Hub's interface hybridflow asks for, over a directory of repositories: org/name/FILES.

A repository holds data or a model. The weights (*.safetensors) of a model come from another address (LFS), as the
Hub's do. What a test sets in a `Hub` takes effect at once.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

SHA = "fedcba9876543210fedcba9876543210fedcba98"
REVISIONS = ("main", "v1", SHA)


@dataclass
class Hub:
    """endpoint: what HF_ENDPOINT has to be. gated: repositories that nobody may read. cut: weights end halfway."""

    endpoint: str
    gated: set[str] = field(default_factory=set)
    cut: bool = False
    asked: list[str] = field(default_factory=list)


@contextmanager
def hub(root: Path) -> Iterator[str]:
    """Serve the repositories below root. Yields what HF_ENDPOINT has to be."""
    with whole_hub(root) as found:
        yield found.endpoint


@contextmanager
def whole_hub(root: Path) -> Iterator[Hub]:
    found = Hub("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            self._answer(unquote(self.path.partition("?")[0]).strip("/").split("/"))

        do_HEAD = do_GET

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            self._paths = parse_qs(self.rfile.read(length).decode())["paths"]
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

        def _answer(self, parts: list[str]) -> None:
            match parts:
                case ["lfs", *file]:
                    return self._send(root.joinpath(*file).read_bytes(), cut=found.cut)
                case ["datasets", org, name, "resolve", revision, *file] if revision in REVISIONS:
                    return self._resolve(org, name, "/".join(file), is_model=False)
                case [org, name, "resolve", revision, *file] if revision in REVISIONS:
                    return self._resolve(org, name, "/".join(file), is_model=True)
                case ["api", "datasets" | "models", org, name, *rest] if (root / org / name).is_dir():
                    if rest and rest[1] not in REVISIONS:
                        return self._missing("RevisionNotFound")
                    files = [_entry(root / org / name, file) for file in sorted((root / org / name).rglob("*"))]
                    if rest[:1] == ["tree"]:
                        return self._json([one for one in files if one["path"].startswith("/".join(rest[2:]))])
                    if rest[:1] == ["paths-info"]:
                        return self._json([one for one in files if one["path"] in self._paths])
                    siblings = [{"rfilename": one["path"]} for one in files]
                    return self._json({"id": f"{org}/{name}", "sha": SHA, "siblings": siblings, "tags": []})
            self._missing("RepoNotFound")

        def _resolve(self, org: str, name: str, file: str, *, is_model: bool) -> None:
            path = root / org / name / file
            if f"{org}/{name}" in found.gated:
                return self._missing("GatedRepo", status=403)
            if not path.is_file():
                return self._missing("EntryNotFound")
            if not (is_model and path.suffix == ".safetensors"):
                return self._send(path.read_bytes())
            body = path.read_bytes()
            linked = {"x-linked-size": str(len(body)), "x-linked-etag": f'"{hashlib.sha256(body).hexdigest()}"'}
            location = f"{found.endpoint}/lfs/{org}/{name}/{file}"
            self._headers(302, {"location": location, "content-length": "0", "x-repo-commit": SHA, **linked})

        def _json(self, tree: Any) -> None:
            self._send(json.dumps(tree).encode(), kind="application/json")

        def _missing(self, code: str, status: int = 404) -> None:
            self._headers(status, {"x-error-code": code, "content-length": "0"})

        def _send(self, body: bytes, *, kind: str = "application/octet-stream", cut: bool = False) -> None:
            etag = f'"{hashlib.sha1(body).hexdigest()}"'
            length = str(len(body))
            self._headers(200, {"content-type": kind, "content-length": length, "etag": etag, "x-repo-commit": SHA})
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if cut else body)

        def _headers(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()


def _entry(repository: Path, file: Path) -> dict[str, Any]:
    path = file.relative_to(repository).as_posix()
    if file.is_dir():
        return {"type": "directory", "path": path, "oid": "0" * 40}
    content = file.read_bytes()
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
