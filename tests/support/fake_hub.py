"""A small Hugging Face hub on loopback: the questions that huggingface_hub asks, and files."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What it holds, and what it was asked for."""

    files: dict[str, dict[str, bytes]]
    """By repository and file."""
    gated: frozenset[str] = frozenset()
    broken: bool = False
    """Answer everything with an internal error."""
    silent_after: int | None = None
    """Leave questions unanswered after so many."""
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""
    closing: threading.Event = field(default_factory=threading.Event)


@contextmanager
def fake_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            hub.asked.append(f"{self.command} {self.path}")

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            if hub.silent_after is not None and len(hub.asked) >= hub.silent_after:
                hub.asked.append(f"{self.command} {self.path}, unanswered")
                hub.closing.wait(30)
                return None
            if hub.broken:
                return self._fail(500, "")
            if parts[:2] == ["api", "models"]:
                return self._api("/".join(parts[2:4]), parts[4:])
            return self._file("/".join(parts[:2]), "/".join(parts[4:]))

        def _api(self, repo: str, rest: list[str]) -> None:
            files = hub.files.get(repo)
            if files is None:
                return self._fail(401, "RepoNotFound")
            if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
                return self._fail(404, "RevisionNotFound")
            if rest[:1] != ["tree"]:
                siblings = [{"rfilename": name} for name in files]
                return self._json({"id": repo, "sha": COMMIT, "siblings": siblings})
            return self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                    for name, data in files.items()
                ]
            )

        def _file(self, repo: str, name: str) -> None:
            data = hub.files.get(repo, {}).get(name)
            if repo in hub.gated:
                return self._fail(403, "GatedRepo")
            if data is None:
                return self._fail(404, "EntryNotFound")
            self._answer(200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT})

        def _json(self, value: object) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _fail(self, status: int, code: str) -> None:
            self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
