"""A real registry on this machine: Debian's `docker-registry`, with its files in a folder."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest

PROGRAM = shutil.which("docker-registry") or shutil.which("registry")
CONFIG = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {folder}}}
  delete: {{enabled: true}}
{auth}
http: {{addr: "127.0.0.1:{port}"}}
"""


@dataclass(frozen=True)
class Registry:
    host: str
    folder: Path

    def blob(self, digest: str) -> Path:
        """Return the file that holds a blob."""
        sha256 = digest.removeprefix("sha256:")
        return self.folder / "docker/registry/v2/blobs/sha256" / sha256[:2] / sha256 / "data"


@contextlib.contextmanager
def running(folder: Path, auth: str = "") -> Iterator[Registry]:
    """Run a registry; auth: the part of its config about logins."""
    if PROGRAM is None:
        pytest.skip("needs a registry: apt-get install docker-registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "registry.yaml"
    config.write_text(CONFIG.format(folder=folder / "blobs", port=port, auth=auth))
    process = subprocess.Popen([PROGRAM, "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < until, "the registry does not answer"
            time.sleep(0.05)
        yield Registry(f"127.0.0.1:{port}", folder / "blobs")
    finally:
        process.terminate()
        process.wait(120)


@contextlib.contextmanager
def giving_tokens(folder: Path, login: str) -> Iterator[str]:
    """Run a server that gives tokens to who logs in, and hand out the part of the registry's config that names it.

    login: user and password as the scheme Basic has them; others get a token that allows nothing, or, with another
    login, none.
    """
    private = folder / "tokens.key"
    certificate = folder / "tokens.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(private), "-out", str(certificate), "-subj", "/CN=tokens", "-days", "2"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    chain = ["".join(certificate.read_text().splitlines()[1:-1])]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            shown = self.headers.get("Authorization")
            if shown not in (None, f"Basic {login}"):
                return self.send_error(401)
            kind, name, actions = query["scope"][0].split(":")
            access = [{"type": kind, "name": name, "actions": actions.split(",")}] if shown else []
            claims = {"iss": "tokens", "aud": query["service"][0], "exp": int(time.time()) + 60, "access": access}
            token = jwt.encode(claims, private.read_bytes(), "ES256", headers={"x5c": chain})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"token": token}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    realm = f"http://127.0.0.1:{server.server_port}/token"
    try:
        yield f"auth: {{token: {{realm: {realm}, service: here, issuer: tokens, rootcertbundle: {certificate}}}}}"
    finally:
        server.shutdown()
        server.server_close()
