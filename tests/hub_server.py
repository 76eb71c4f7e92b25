"""What of the HuggingFace Hub's interface `datasets` asks for, over a directory of data sets: org/name/FILES."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

SHA = "fedcba9876543210fedcba9876543210fedcba98"
REVISIONS = ("main", "v1", SHA)


@contextmanager
def hub(root: Path) -> Iterator[str]:
    """Serve the data sets below root. Yields what HF_ENDPOINT has to be."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
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
                case ["datasets", org, name, "resolve", revision, *file] if revision in REVISIONS:
                    path = root.joinpath(org, name, *file)
                    return self._send(path.read_bytes()) if path.is_file() else self._missing("EntryNotFound")
                case ["api", "datasets", org, name, *rest] if (root / org / name).is_dir():
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

        def _json(self, tree: Any) -> None:
            self._send(json.dumps(tree).encode(), "application/json")

        def _missing(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("content-length", "0")
            self.end_headers()

        def _send(self, body: bytes, kind: str = "application/octet-stream") -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.send_header("etag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("x-repo-commit", SHA)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def _entry(data_set: Path, file: Path) -> dict[str, Any]:
    path = file.relative_to(data_set).as_posix()
    if file.is_dir():
        return {"type": "directory", "path": path, "oid": "0" * 40}
    content = file.read_bytes()
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
