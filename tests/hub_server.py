"""A local HTTP server that answers what `huggingface_hub` asks.

It can fail as networks and hubs do.

Endpoints: `GET /api/models/<id>[/revision/<rev>]`, `HEAD` and `GET /<id>/resolve/<rev>/<file>`; large files are
redirected to `/cdn/<sha256>` under another host name, as the hub does, with Range requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"


@dataclass
class Repository:
    """Commits by hash, each with its files; `refs` are branches and tags.

    `token`: who shows it may read; `gated`: others may see it.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit of these files and move `ref` to it."""
        sha = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[sha], self.refs[ref] = dict(files), sha
        return sha


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


class HubServer:
    """Server of `hub.repositories` on `hub.url`, a free port of this machine.

    Use as `with HubServer() as hub:`.

    `drop_after`: a large file's connection is closed after that many bytes, and all later ones for large files at once.
    `announce`: added to the sizes that HEAD gives of large files. `damage`: large files come with their last byte
    changed.
    `pause_after`: that many bytes of a large file are sent, the rest once `resume` is set. `failing`: the status that
    every request gets.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.drop_after: int | None = None
        self.announce = 0
        self.damage = False
        self.pause_after: int | None = None
        self.resume = threading.Event()
        self.failing: int | None = None
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.cdn = f"http://localhost:{self._server.server_port}/cdn"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def model(self, name: str, files: dict[str, bytes]) -> str:
        """Make a repository with one commit on main, and return the commit's hash."""
        self.repositories[name] = Repository()
        return self.repositories[name].commit(files)

    def asked(self, part: str, method: str = "GET") -> list[Request]:
        return [request for request in self.requests if part in request.path and request.method == method]

    def large(self) -> dict[str, bytes]:
        """Large files of all commits by sha256."""
        files = {}
        for repository in self.repositories.values():
            for commit in repository.commits.values():
                large = [data for name, data in commit.items() if name.endswith(LARGE)]
                files |= {hashlib.sha256(data).hexdigest(): data for data in large}
        return files


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: the second would wait for an answer to the first
    server_hub: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_hub
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        hub.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        if hub.failing:
            return self._send(hub.failing)
        if path.startswith("/cdn/"):
            return self._large(hub.large()[path.rpartition("/")[2]])
        api = re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)
        if not (api or file):
            return self._send(404)
        name, revision = api.groups() if api else file.groups()[:2]
        repository = hub.repositories.get(name)
        if repository is None or (repository.token not in (None, token) and not repository.gated):
            return self._send(404 if token else 401, {"X-Error-Code": "RepoNotFound"} if token else {})
        if repository.token not in (None, token) and file:
            return self._send(
                403 if token else 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            )
        commit = repository.refs.get(revision or "main", revision)
        if commit not in repository.commits:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        if api:
            info = {
                "id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": file} for file in sorted(files)],
            }  # fmt: skip
            return self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())
        return self._file(commit, file.group(3), files)

    def _file(self, commit: str, name: str, files: dict[str, bytes]) -> None:
        headers = {"X-Repo-Commit": commit}
        if name not in files:
            return self._send(404, {**headers, "X-Error-Code": "EntryNotFound"})
        data = files[name]
        if name.endswith(LARGE):
            sha256 = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(data) + self.server_hub.announce)}
            return self._send(302, {**headers, "Location": f"{self.server_hub.cdn}/{sha256}"})
        return self._send(200, {**headers, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data)

    def _large(self, data: bytes) -> None:
        hub = self.server_hub
        start = 0
        if hub.damage:
            data = data[:-1] + bytes([data[-1] ^ 1])
        size = len(data)
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(match[1])
        headers = {"Content-Range": f"bytes {start}-{size - 1}/{size}"} if start else {}
        stop = size if hub.drop_after is None else min(size, start + hub.drop_after)
        self._send(206 if start else 200, headers, data[start:], stop - start)
        if hub.drop_after is not None and stop < size:
            hub.drop_after = 0

    def _send(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", part: int | None = None
    ) -> None:
        """Send all of the answer, or a part of it and then close the connection.

        The part is the first `part` bytes of the body.
        """
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # of a client that was killed
                self._write(body if part is None else body[:part])
        if part is not None and part < len(body):
            self.close_connection = True

    def _write(self, body: bytes) -> None:
        hub = self.server_hub
        first = len(body) if hub.pause_after is None else hub.pause_after
        self.wfile.write(body[:first])
        if body[first:]:
            hub.resume.wait()
            self.wfile.write(body[first:])
